"""Write what a node does as a line of code in which its inputs are slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from featx.ir.node import Node, Target
from featx.ir.text import format_target

# Room for arguments and for one literal among them, in characters.
_ROOM = 160
_LITERAL_ROOM = 40
_MORE = "…"


class CallText:
    """Describes calls; remembers the names of functions, which are most of the cost."""

    def __init__(self) -> None:
        self._names: dict[Target, str] = {}

    def of(self, node: Node, inputs: Sequence[Node]) -> tuple[str, str]:
        """Return what is called, in a word, and the call, in which `⟨k⟩` stands for `inputs[k]`. O(arguments)."""
        slots = {item: f"⟨{position}⟩" for position, item in enumerate(inputs)}
        target = node.target
        if node.op == "placeholder":
            default = f" = {_short(node.args[0], slots)}" if node.args else ""
            return "input", f"{target}{default}"
        if node.op == "output":
            return "output", f"return {_short(node.args[0] if node.args else None, slots)}"
        if node.op == "get_attr":
            return "attribute", f"self.{target}"
        if node.op == "call_module":
            return "module", f"self.{target}({_join(_arguments(node.args, node.kwargs), slots)})"
        if node.op == "call_method":
            owner = _short(node.args[0], slots) if node.args else ""
            return str(target), f"{owner}.{target}({_join(_arguments(node.args[1:], node.kwargs), slots)})"
        name = self._names.get(target)
        if name is None:
            name = self._names[target] = format_target(target).removeprefix("builtins.")
        return name.rpartition(".")[2].lstrip(
            "_"
        ) or name, f"{name}({_join(_arguments(node.args, node.kwargs), slots)})"


def _join(parts: Iterable[tuple[str, Any]], slots: Mapping[Node, str]) -> str:
    texts: list[str] = []
    room = _ROOM
    for prefix, argument in parts:
        if room <= 0:
            texts.append(_MORE)
            break
        texts.append(prefix + _short(argument, slots))
        room -= len(texts[-1])
    return ", ".join(texts)


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from (("", argument) for argument in args)
    yield from ((f"{name}=", argument) for name, argument in kwargs.items())


def _short(argument: Any, slots: Mapping[Node, str]) -> str:  # Any: arguments are of any type
    if isinstance(argument, Node):
        return slots.get(argument, argument.name)
    if isinstance(argument, (tuple, list)):
        items = cast(Sequence[Any], argument)
        text = _join((("", item) for item in items), slots)
        if isinstance(argument, list):
            return f"[{text}]"
        return f"({text},)" if len(items) == 1 else f"({text})"
    if isinstance(argument, dict):
        pairs = cast(Mapping[Any, Any], argument).items()
        return f"{{{_join(((f'{key!r}: ', value) for key, value in pairs), slots)}}}"
    if isinstance(argument, slice):
        return f"slice({_join((('', end) for end in (argument.start, argument.stop, argument.step)), slots)})"
    if isinstance(argument, torch.Tensor):
        return f"tensor({'×'.join(map(str, argument.shape))})"
    if isinstance(argument, type):
        return argument.__name__
    text = repr(argument).replace("⟨", "<").replace("⟩", ">")
    return text if len(text) <= _LITERAL_ROOM else text[:_LITERAL_ROOM] + _MORE
