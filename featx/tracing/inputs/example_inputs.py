"""Turn the example that a model is traced with into placeholders and followed values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.errors import ArgumentTypeError
from featx.ir.node import Node
from featx.ir.runtime_checks import is_runtime_check
from featx.rebuilding import attributes_of
from featx.tracing.guards.forms import form_of
from featx.tracing.guards.guards import (
    check_array,
    check_constant,
    check_decision,
    check_form,
    check_is_tensor,
    check_not_given,
)
from featx.tracing.history.lineage import Part
from featx.tracing.inputs.dict_inputs import keys_read_by
from featx.tracing.inputs.model_call import as_given
from featx.tracing.nodes.value_types import type_of_option
from featx.tracing.objects.arrays import description_of, is_array
from featx.tracing.objects.plain_objects import LIBRARIES, PLAIN_TYPES
from featx.tracing.objects.structure import Path, contents_of, copy_structure, is_structure, text_of
from featx.tracing.recording.results import ContentsSnapshot
from featx.tracing.signals import Untraceable
from featx.tree import items_at, with_defaults

if TYPE_CHECKING:
    from featx.tracing.recording.recorder import Recorder
    from featx.tracing.recording.results import Results
    from featx.tracing.replica.model_context import ModelContext

_PLAIN = tuple(PLAIN_TYPES)


def bind_example(
    recorder: Recorder,
    results: Results,
    context: ModelContext,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    stand_in: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any], list[ContentsSnapshot]]:
    """Make a placeholder for each parameter of what is traced, and return what to call it with.

    Tensors come from `stand_in`, and are followed, also inside of containers and objects. Everything else is part of
    what is traced, and is checked at run time. A parameter that the example leaves out has its default value. Of a
    dict, the keys are checked that forward reads, if these are known.

    Raises:
        ArgumentTypeError: the example does not fit the signature.
        Untraceable: it holds something that cannot be compared with what a later call gives.
    """
    signature = context.signature
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = ". A dict has inputs by name; give one that is an input itself in a tuple" if kwargs and not args else ""
        raise ArgumentTypeError(f"the example inputs do not fit forward{signature}: {error}{hint}") from error
    given: list[ContentsSnapshot] = []
    for name, parameter in signature.parameters.items():
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        is_given = name in bound.arguments
        default = () if parameter.default is parameter.empty else (parameter.default,)
        default = default if not default or _is_plain(default[0]) else (...,)
        if is_given and default and _is_plain(bound.arguments[name]):
            default = (bound.arguments[name],)  # so that who calls the graph need not repeat it
        node = recorder.add_node("placeholder", stars + name, cast(Any, default), {}, None, None)
        if parameter.annotation is not parameter.empty:
            node.type = parameter.annotation
        elif not stars:
            value = bound.arguments.get(name, parameter.default)
            node.type = type_of_option(value) if isinstance(value, _PLAIN) else None
        if parameter.kind is parameter.KEYWORD_ONLY:
            node.meta["keyword_only"] = True
        if is_given:
            example, is_optional = bound.arguments[name], parameter.default is not parameter.empty
            source = _with_options(recorder, node, example) if parameter.kind is parameter.VAR_KEYWORD else node
            keys_read = keys_read_by(context.traced, name) if type(example) is dict and not stars else None
            followed = _Followed(recorder, results, source, stand_in, name, keys_read)
            bound.arguments[name] = followed.value(example, name, is_optional)
            given += followed.given
        elif stars:
            followed = _Followed(recorder, results, node, stand_in, name)
            followed.value(() if parameter.kind is parameter.VAR_POSITIONAL else {}, name, False)
        elif default:
            _Followed(recorder, results, node, stand_in, name).left_out(default[0], name)
    return *as_given(bound, len(args)), given


def _with_options(recorder: Recorder, node: Node, given: Mapping[str, Any]) -> Node:
    """Return `node`, which has what a caller gives for `**kwargs`, with the options of the example that are missing.

    So who calls the graph need not repeat them, as for parameters with a default.
    """
    options = {key: value for key, value in given.items() if _is_plain(value)}
    if not options:
        return node
    filled = recorder.graph.create_node("call_function", with_defaults, (node, options, tuple(given)), {}, "keywords")
    filled.meta["is_check_of_input"] = True
    return filled


class _Followed:
    """One input of the example.

    Args:
        recorder: makes the nodes.
        results: follows the tensors.
        node: has the input.
        stand_in: makes what forward gets in place of a tensor.
        name: that of the input.
        keys_read: of a dict, the keys that forward reads, if it does nothing else with it.
    """

    def __init__(
        self,
        recorder: Recorder,
        results: Results,
        node: Node,
        stand_in: Callable[[torch.Tensor], torch.Tensor],
        name: str,
        keys_read: tuple[str, ...] | None = None,
    ) -> None:
        self._recorder, self._results = recorder, results
        # The containers and objects in it.
        self.given: list[ContentsSnapshot] = []
        self._node = node
        self._name = name
        self._is_starred = node.op != "placeholder" or str(node.target).startswith("*")
        self._stand_in = stand_in
        self._parts: dict[Path, Node | Part] = {(): node}
        self._keys_read = keys_read

    def value(self, example: Any, name: str, is_optional: bool) -> Any:
        if isinstance(example, torch.Tensor):
            self._check_layout(example, ())
            if is_optional:
                self._mark(check_form, (self._node, form_of(example), f"input '{name}'"))
            else:
                self._mark(check_is_tensor, (self._node, f"input '{name}'"))
            return self._results.follow(self._stand_in(example), self._node, None)
        if isinstance(example, _PLAIN):
            _refuse_attributes(example, f"input '{name}'")
            self._mark(check_constant, (self._node, example, f"input '{name}'"))
            return example
        if is_structure(example):
            read = self._node
            if self._keys_read is not None:
                read = self._mark(items_at, (self._node, self._keys_read), name="read_items")
            self._mark(check_form, (read, form_of(example), f"input '{name}'"))
        return copy_structure(example, self._leaf, self._note_copy)

    def left_out(self, held: Any, name: str) -> None:
        """Check that an input is left out again, or is `held`: its default, or `...` where a graph cannot hold that."""
        if held is None:
            self._mark(check_not_given, (self._node, f"input '{name}'"))
        else:
            self._mark(check_constant, (self._node, held, f"input '{name}'"))

    def _leaf(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            self._check_layout(value, path)
            return self._results.follow(self._stand_in(value), self._part(path), None)
        self._check_leaf(value, path)
        return value.copy() if is_array(value) else value

    def _note_copy(self, duplicate: Any, path: Path) -> None:
        if not path and self._is_starred:
            return  # Python itself makes the tuple of `*args` and the dict of `**kwargs`
        self.given.append(ContentsSnapshot(f"the input '{self._name}'", duplicate, contents_of(duplicate)))
        if not isinstance(duplicate, (tuple, list, dict)):  # those are made anew where they are passed on
            self._recorder.lineage.put(duplicate, self._part(path))

    def _part(self, path: Path) -> Node | Part:
        known = self._parts.get(path)
        if known is None:
            function, key = path[-1]
            known = self._parts[path] = Part(self._part(path[:-1]), function, key)
        return known

    def _check_layout(self, tensor: torch.Tensor, path: Path) -> None:
        if tensor.is_nested:
            raise Untraceable(
                f"input '{self._name}{text_of(path)}' is a nested tensor, whose rows have lengths of their own,"
            )
        if tensor.layout is not torch.strided:
            node = self._mark(getattr, (self._plain_node(self._part(path)), "layout"))
            self._mark(check_decision, (node, tensor.layout, f"the layout of input '{self._name}{text_of(path)}'"))

    def _check_leaf(self, value: Any, path: Path) -> None:
        where = f"input '{self._name}{text_of(path)}'"
        _refuse_attributes(value, where)
        # Texts, truth values and None are part of the form.
        if value is None or isinstance(value, (bool, str)):
            return
        node = self._plain_node(self._part(path))
        if isinstance(value, (int, float, complex)) or _compares_by_value(value) or callable(value):
            self._mark(check_constant, (node, value, where))
        elif is_array(value):
            self._mark(check_array, (node, *description_of(value), where))
        else:
            raise Untraceable(
                f"{where} holds a {type(value).__name__}, which cannot be compared with that of a later call; give the "
                "tensors in it as inputs, or in a list, a dict or an object with attributes,"
            )

    def _plain_node(self, origin: Node | Part) -> Node:
        if isinstance(origin, Node):
            return origin
        return self._mark(origin.function, (self._plain_node(origin.owner), origin.key))

    def _mark(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str | None = None) -> Node:
        node = self._recorder.graph.create_node("call_function", function, arguments, {}, name)
        node.meta["is_guard"] = is_runtime_check(function)
        node.meta["is_check_of_input"] = True
        return node


def _is_plain(value: object) -> bool:
    """Say whether a graph can hold a value as the default of an input."""
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, cast(tuple[Any, ...], value))))


def _refuse_attributes(value: Any, where: str) -> None:
    """Raise where a value of a class of its own, such as a text, has attributes, which its comparison leaves out.

    Raises:
        Untraceable: it has some.
    """
    kind = type(value)
    if callable(value) or isinstance(value, enum.Enum) or kind.__module__.partition(".")[0] in LIBRARIES:
        return
    attributes = attributes_of(value)
    if attributes:
        raise Untraceable(
            f"{where} is a {kind.__name__} with the attribute '{min(attributes)}', which a check of its value leaves "
            "out; give its attributes as inputs, or in a list, a dict or an object that holds nothing else,"
        )


def _compares_by_value(value: Any) -> bool:
    """Say whether a value never changes and equals another one if both are the same."""
    if isinstance(value, (slice, set)):
        return True
    kind = type(value)
    if kind.__eq__ is object.__eq__ and not isinstance(value, (enum.Enum, torch.dtype, torch.device)):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True
