"""Turn targets into the unique names of nodes, and functions into the names that code refers to them by."""

import builtins
import keyword
import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.ir.identifiers import plain_text

if TYPE_CHECKING:
    from featx.ir.node import Node

# What every generated function may refer to without an import; a node never takes one of these names.
CODE_GLOBALS = frozenset({"inf", "nan", "NoneType", "torch", "device", "fx_pytree", "pytree"})
_RESERVED = frozenset(keyword.kwlist) | frozenset(dir(builtins)) | CODE_GLOBALS
_CAMEL_BOUNDARY = re.compile(r"(?<=[a-z])([A-Z])")
_NOT_IN_IDENTIFIER = re.compile(r"[^0-9a-zA-Z_]+")


def shown_name(node: "Node") -> str:
    """Return what messages call a node: the qualified name, by which it is asked for, if it has one."""
    return str(node.meta.get("qualified_name", node.name))


def name_to_ask(node: "Node") -> str | None:
    """Return the qualified name of a node that a submodule made, where neither its name nor its target shows it.

    `add_3` may be asked for as `layer2.0.add`; the node `layer2_0_conv1` is shown with its target `layer2.0.conv1`.
    None for graphs of a symbolic trace, whose texts are those of torch.fx.
    """
    if not getattr(node.graph.tracer_cls, "shows_names", False):
        return None
    name: object = node.meta.get("qualified_name")
    if not isinstance(name, str) or "." not in name or name == node.target or name.replace(".", "_") == node.name:
        return None
    return name


class Namespace:
    """Hands out identifiers, each once, numbered as torch.fx numbers them.

    `relu` is followed by `relu_1`; a name that is a keyword or a builtin starts at `_1`. One call costs O(1) unless
    the caller asks for numbered names out of order.
    """

    __slots__ = ("_counts", "_given", "_used")

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._counts: dict[str, int] = {}
        # The names given out, in order, each with its base and what the count of that was before.
        self._given: list[tuple[str, str, int | None]] = []

    def create_name(self, candidate: str) -> str:
        """Return `candidate` as an identifier that this namespace has not given out before."""
        name = base = identifier_of(candidate)
        number = None
        if name[-1].isdigit():
            stem, _, digits = name.rpartition("_")
            if stem and digits.isdigit():
                base, number = stem, int(digits)
        used = self._used
        if number is None or name in used:
            number = self._counts.get(base, 0)
            if name in _RESERVED:
                number += 1
                name = f"{base}_{number}"
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        self._given.append((name, base, self._counts.get(base)))
        self._counts[base] = number
        return name

    def mark(self) -> int:
        """Return what `forget` takes: how many names have been given out."""
        return len(self._given)

    def forget(self, mark: int) -> None:
        """Take back the names given out since `mark`: the next ones are what they would have been then."""
        while len(self._given) > mark:
            name, base, count = self._given.pop()
            self._used.discard(name)
            if count is None:
                self._counts.pop(base, None)
            else:
                self._counts[base] = count

    def reserve(self, name: str) -> None:
        """Never give out `name`."""
        self._used.add(name)

    def release(self, name: str) -> None:
        """Let `name` be given out again."""
        self._used.discard(name)


def identifier_of(candidate: str) -> str:
    """Return `candidate` with what cannot stand in an identifier replaced: `layer1.0` gives `layer1_0`."""
    if type(candidate) is not str:
        candidate = plain_text(candidate)
    dotless = candidate.replace(".", "_")
    if dotless.isidentifier() and dotless.isascii() and ".." not in candidate:
        return dotless
    identifier = _NOT_IN_IDENTIFIER.sub("_", candidate) or "_unnamed"
    return "_" + identifier if identifier[0].isdigit() else identifier


def name_of_target(target: str | Callable[..., Any]) -> str:
    """Return the name that a node calling `target` starts from: `torch.relu` and `"relu"` give `relu`."""
    if not isinstance(target, str):
        name = _function_name(target)
    else:
        is_magic = target.startswith("__") and target.endswith("__") and len(target) > 4
        name = target[2:-2] if is_magic else target
    return name if name.islower() else _CAMEL_BOUNDARY.sub(r"_\1", name).lower()


def _function_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None)
    if type(function) is torch.jit.ScriptFunction:
        name = cast(Any, function).name
    if name == "__call__":  # of an object that has no hash
        function = getattr(function, "__self__", function)
        name = None
    return name if isinstance(name, str) else type(function).__name__


def qualified_name(function: Callable[..., Any]) -> str:
    """Return the dotted name by which people write `function`: `torch.relu`, `operator.add`, `getattr`."""
    name = _function_name(function)
    if getattr(builtins, name, None) is function:
        return name
    if getattr(torch.Tensor, name, None) is function:
        return f"torch.Tensor.{name}"
    module = _module_of(function, name)
    if module == "_operator":
        return f"operator.{name}"
    if module.startswith("torch._ops"):
        return str(function) if str(function).startswith("torch.ops") else f"torch.ops.{function}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and isinstance(function, (types.BuiltinFunctionType, types.MethodType)):
        return f"{owner.__module__}.{owner.__qualname__}.{name}"
    if not isinstance(function, (types.BuiltinFunctionType, types.FunctionType, type)):
        return f"{module}.{name}"
    return f"{module}.{getattr(function, '__qualname__', name) if isinstance(function, type) else name}"


def has_borrowed_name(function: Callable[..., Any]) -> bool:
    """Say whether `qualified_name` is that of another function, as `functools.wraps` copies it."""
    if isinstance(function, types.FunctionType):
        home = str(function.__globals__.get("__name__"))
    elif "__wrapped__" in getattr(function, "__dict__", {}):
        home = type(function).__module__
    else:
        return False
    return home.partition(".")[0] != qualified_name(function).partition(".")[0]


def resolve(name: str) -> Any:  # Any: whatever torch has there
    """Return the object of torch with this dotted name (`torch.nn.functional.relu`), or None."""
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def _module_of(function: Callable[..., Any], name: str) -> str:
    module = getattr(function, "__module__", None)
    if isinstance(module, str) and module:
        return module
    # Functions written in C do not always say where they live.
    for guess in (torch, torch.nn.functional, getattr(torch._C, "_nn")):  # noqa: B009 - torch's stubs lack it
        if getattr(guess, name, None) is function:
            return guess.__name__
    return type(function).__module__
