"""Write the arguments of calls by keyword, as the signature of what is called names them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from featx.ir.arguments import Argument
from featx.ir.effects import CallEffects, Effects
from featx.ir.node import Node
from featx.ir.repeatable import has_hooks
from featx.ir.rewiring import keep_measured_effects
from featx.ir.schemas import signature_of_function
from featx.module import GraphModule, check_graph_module

_Keywords = dict[str, Argument]
# What the types of an operator's schema are called, by the type of a literal.
_NAMES_OF_TYPES: dict[type, tuple[str, ...]] = {
    bool: ("bool", "number"),
    int: ("int", "float", "number"),
    float: ("float", "number"),
    complex: ("number",),
    str: ("str", "Device"),
    torch.device: ("Device",),
    torch.Generator: ("Generator",),
    torch.Tensor: ("Tensor",),
    nn.Parameter: ("Tensor",),
}
# Arguments that Python calls otherwise than the schema of the operator does.
_NAMES_IN_PYTHON = {("aten::to", "other"): "tensor", ("aten::tensor", "t"): "data"}
# Types that a schema calls int; the argument says by its name what it takes.
_KINDS_OF_INT: dict[type, str] = {
    torch.dtype: "dtype",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def normalize_arguments(gm: GraphModule) -> bool:
    """Turn positional arguments of calls into keyword arguments, in the order of the signature.

    Modules, functions written in Python and operators (`torch.ops`) have a signature; for functions and methods of
    torch written in C the schemas of the operator are asked, and if those that fit the arguments name them differently
    the call is left alone. So are modules with hooks (which may get the arguments), checks, calls that take any number
    of arguments, and calls whose effects could not be told any more. The owner of a method stays positional. Defaults
    are not filled in. Returns whether anything changed. O(nodes + edges).
    """
    normalizing = _Normalizing(check_graph_module(gm))
    changed = False
    for node in gm.graph.nodes:
        changed = normalizing.visit(node) or changed
    return changed


class _Normalizing:
    def __init__(self, gm: GraphModule) -> None:
        self._before = Effects(gm.graph, gm)
        self._after = Effects(gm.graph, gm)
        self._signatures: dict[Any, inspect.Signature | None] = {}
        self._schemas: dict[str, list[Any]] = {}

    def visit(self, node: Node) -> bool:
        """Rewrite the arguments of `node` and say whether that changed anything."""
        kept = 1 if node.op == "call_method" else 0
        if node.op in ("placeholder", "get_attr", "output") or len(node.args) <= kept:
            return False
        effects = self._before.of(node)
        if effects.is_check or effects.changes_global_state:
            return False
        keywords = self._keywords(node)
        if keywords is None:
            return False
        args, kwargs, meta, inputs = node.args, node.kwargs, node.meta, node.all_input_nodes
        node.meta = meta.copy()
        node.args, node.kwargs = args[:kept], keywords
        keep_measured_effects(node, inputs)
        if not _is_same(effects, self._after.of(node)):
            node.args, node.kwargs, node.meta = args, kwargs, meta
            return False
        return True

    def _keywords(self, node: Node) -> _Keywords | None:
        """Return all arguments by name, without the owner of a method; None where that is not known."""
        target = node.target
        if node.op == "call_method":
            return _by_schemas(self._schemas_of(target), node.args, node.kwargs, "self")
        if node.op == "call_module":
            module = self._before.module_of(node)
            if module is None or has_hooks(module) or "forward" in module.__dict__:
                return None
            keywords = self._by_signature(type(module).forward, (None, *node.args), node.kwargs)
            return keywords and dict(list(keywords.items())[1:])  # without the module itself
        if isinstance(target, torch._ops.OpOverload):
            return _by_schemas([target._schema], node.args, node.kwargs, None)
        if inspect.isfunction(target):
            return self._by_signature(target, node.args, node.kwargs)
        if isinstance(target, torch._ops.OpOverloadPacket) or not inspect.isbuiltin(target):
            return None
        is_of_torch = (target.__module__ or "torch").startswith("torch")
        return _by_schemas(self._schemas_of(target.__name__), node.args, node.kwargs, "input") if is_of_torch else None

    def _schemas_of(self, name: str) -> list[Any]:
        if name not in self._schemas:
            self._schemas[name] = _tensor_schemas(name)
        return self._schemas[name]

    def _by_signature(
        self, function: Callable[..., Any], args: tuple[Argument, ...], kwargs: Mapping[str, Argument]
    ) -> _Keywords | None:
        if function not in self._signatures:
            self._signatures[function] = _signature(function)
        signature = self._signatures[function]
        if signature is None:
            return None
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return None  # it is to be raised when the graph runs
        keywords: _Keywords = {}
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            if kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
                return None
            keywords.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return keywords


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return signature_of_function(function)
    except (TypeError, ValueError):
        return None


def _by_schemas(
    schemas: Iterable[Any], args: tuple[Argument, ...], kwargs: Mapping[str, Argument], owner: str | None
) -> _Keywords | None:
    """Return the arguments by the names that all schemas which fit them have for them.

    `owner` is what Python calls the argument `self`; "self" leaves it out, where it is the first one.
    """
    found: _Keywords | None = None
    for schema in schemas:
        keywords = _bound_to(schema, args, kwargs, owner)
        if keywords is None:
            continue
        if (found is not None and list(found) != list(keywords)) or _may_be_first_of_many(schema, args):
            return None
        found = keywords
    if found is None or owner != "self":
        return found
    del found["self"]
    return found


def _bound_to(
    schema: Any, args: tuple[Argument, ...], kwargs: Mapping[str, Argument], owner: str | None
) -> _Keywords | None:
    """Return the arguments by the names in `schema`; None where they do not fit."""
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(positional) or (owner == "self" and positional[0].name != owner):
        return None
    keywords: _Keywords = {}
    known = set(kwargs)
    for place, argument in enumerate(schema.arguments):
        name: str = argument.name
        if owner is not None:
            name = _NAMES_IN_PYTHON.get((schema.name, name), name)
        if name == "self" and owner == "input":
            if str(argument.type) != "Tensor":
                return None  # a number in place of a tensor, which Python does not rename
            name = owner
        if place < len(args):
            value = args[place]
        elif name in known:
            value = kwargs[name]
        elif argument.has_default_value():
            continue
        else:
            return None
        if (place < len(args) and name in known) or not _fits(value, argument):
            return None
        keywords[name] = value
        known.discard(name)
    return None if known else keywords


def _may_be_first_of_many(schema: Any, args: tuple[Argument, ...]) -> bool:
    """Say whether the last argument may be an int where there may be any number of them: `x.view(n)`."""
    argument = schema.arguments[len(args) - 1]
    return isinstance(args[-1], Node) and argument.N is None and str(argument.type) == "List[int]"


def _fits(value: Argument, argument: Any) -> bool:
    """Say whether `value` may be what `argument` of a schema takes."""
    kind = str(argument.type)
    if value is None:
        return kind.startswith("Optional[")
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    if isinstance(value, (list, tuple)):
        inner = kind.removeprefix("List[").removesuffix("]")
        return kind.startswith("List[") and all(_is_of(item, inner, argument.name) for item in value)
    if kind.startswith("List[") and argument.N is not None and isinstance(value, int):
        kind = kind.removeprefix("List[").removesuffix("]")  # one number for all of a fixed number of them
    return _is_of(value, kind, argument.name)


def _is_of(value: Argument, kind: str, name: str) -> bool:
    if isinstance(value, Node):
        # Without an example it may be anything.
        return "shape" not in value.meta or kind in ("Tensor", "Optional[Tensor]")
    meant = next((word for word in _KINDS_OF_INT.values() if word in name), None) if kind == "int" else None
    if meant is not None:
        return _KINDS_OF_INT.get(type(value)) == meant
    return kind.removeprefix("Optional[").removesuffix("]") in _NAMES_OF_TYPES.get(type(value), ())


def _tensor_schemas(name: str) -> list[Any]:
    """Return the schemas of the operators of this name on tensors, but for those that Python does not offer."""
    schemas: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return [
        schema
        for schema in schemas
        if any("Tensor" in str(value.type) for value in (*schema.arguments, *schema.returns))
        and not any(argument.kwarg_only and argument.alias_info is not None for argument in schema.arguments)
    ]


def _is_same(one: CallEffects, other: CallEffects) -> bool:
    return (
        set(one.writes) == set(other.writes)
        and set(one.shares) == set(other.shares)
        and one.is_opaque == other.is_opaque
        and one.is_random == other.is_random
        and one.writes_state == other.writes_state
    )
