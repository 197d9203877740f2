"""Turn the example that a model is traced with into placeholders and followed values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.errors import ArgumentTypeError
from featx.ir.node import Node
from featx.tracing.guards import check_decision, check_form, form_of
from featx.tracing.inputs import check_is_none, check_is_same, signature_of
from featx.tracing.lineage import Part

if TYPE_CHECKING:
    from featx.tracing.recording import Recording

_PLAIN = (bool, int, float, complex, str, type(None))


def bind_example(
    recording: Recording,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    stand_in: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make a placeholder for each parameter of `function`, and return what to call it with.

    Tensors come from `stand_in`, and are followed; numbers, strings and None are part of what is traced, and are
    checked at run time. A parameter that the example leaves out has its default value.

    Raises:
        ArgumentTypeError: the example does not fit the signature.
    """
    signature = signature_of(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__qualname__", "forward")
        raise ArgumentTypeError(f"the example inputs do not fit {name}{signature}: {error}") from error
    for name, parameter in signature.parameters.items():
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        is_given = name in bound.arguments
        default = () if parameter.default is parameter.empty else (parameter.default,)
        default = default if not default or isinstance(default[0], _PLAIN) else (None,)
        if is_given and default and isinstance(bound.arguments[name], _PLAIN):
            default = (bound.arguments[name],)  # so that who calls the graph need not repeat it
        node = recording.add_node("placeholder", stars + name, cast(Any, default), {}, None, None)
        if parameter.annotation is not parameter.empty:
            node.type = parameter.annotation
        if parameter.kind is parameter.KEYWORD_ONLY:
            node.meta["keyword_only"] = True
        if is_given:
            is_optional = parameter.default is not parameter.empty
            bound.arguments[name] = _Followed(recording, node, stand_in).value(bound.arguments[name], name, is_optional)
        elif stars:
            followed = _Followed(recording, node, stand_in)
            followed.value(() if parameter.kind is parameter.VAR_POSITIONAL else {}, name, False)
        elif default and parameter.default is not None:
            check = recording.graph.create_node("call_function", check_is_same, (node, *default, name), {})
            check.meta["is_check_of_input"] = True
        elif default:
            check = recording.graph.create_node("call_function", check_is_none, (node, name), {})
            check.meta["is_check_of_input"] = True
    return bound.args, bound.kwargs


class _Followed:
    """One input of the example."""

    def __init__(self, recording: Recording, node: Node, stand_in: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._recording = recording
        self._node = node
        self._stand_in = stand_in

    def value(self, example: Any, name: str, is_optional: bool) -> Any:
        if isinstance(example, torch.Tensor):
            if is_optional:
                self._check(check_form, form_of(example), f"input '{name}'")
            return self._recording.follow(self._stand_in(example), self._node, None)
        if isinstance(example, _PLAIN):
            self._check(check_decision, example, f"input '{name}'")
            return example
        if isinstance(example, (tuple, list, dict)):
            self._check(check_form, form_of(example), f"input '{name}'")
        return self._nested(example, self._node)

    def _check(self, check: Callable[..., Any], expected: Any, what: str) -> None:
        node = self._recording.graph.create_node("call_function", check, (self._node, expected, what), {})
        node.meta["is_guard"] = True
        node.meta["is_check_of_input"] = True

    def _nested(self, value: Any, origin: Node | Part) -> Any:
        if isinstance(value, torch.Tensor):
            return self._recording.follow(self._stand_in(value), origin, None)
        if isinstance(value, dict):
            items = cast(dict[Any, Any], value).items()
            return type(value)({key: self._nested(item, Part(origin, operator.getitem, key)) for key, item in items})
        if isinstance(value, (tuple, list)):
            items = cast(list[Any], value)
            parts = [self._nested(item, Part(origin, operator.getitem, i)) for i, item in enumerate(items)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value
