"""Translate the arguments of calls for torch.fx, with helper nodes for what its code cannot hold."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.fx
from torch import nn

from featx.errors import ArgumentTypeError
from featx.interop.meta import HELPER
from featx.interop.named import Named, has_name
from featx.interop.written import is_written
from featx.ir.arguments import collect_nodes
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.module import GraphModule


class Arguments:
    """Translates what stands in `graph`, whose targets `module` has; helper nodes go to the end of `result`.

    `twins` are the nodes of `result` for those of `graph`, as far as they are there. `attributes` is what helper nodes
    read, by the names that the new module is to have it under.
    """

    def __init__(
        self, graph: Graph, module: GraphModule | None, result: torch.fx.Graph, twins: Mapping[Node, torch.fx.Node]
    ) -> None:
        self.attributes: dict[str, Any] = {}
        self._module, self._result, self._twins = module, result, twins
        self._names = {node.name for node in graph.nodes}
        # Helper nodes by the id of the literal, and functions by theirs; the graph keeps both alive.
        self._constants: dict[int, torch.fx.Node] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._numbers = {"_tensor_constant": itertools.count(), "_constant": itertools.count()}

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, in a `Named` where torch.fx's code would call something else by its name."""
        known = self._functions.get(id(function))
        if known is None:
            known = self._functions[id(function)] = function if has_name(function) else Named(function)
        return known

    def second_name(self, value: Any, node: Node) -> torch.fx.Node:
        """Return a helper node that has `value`, a translated argument of `node`, which that may assign."""
        return self._helper("alias", "call_function", operator.getitem, ((value,), 0), f"{node.name}_argument")

    def of(self, value: Any, *, nested: bool = False) -> Any:
        """Return `value` with the nodes of torch.fx in it, and with helper nodes for what torch.fx cannot write."""
        kind = type(value)
        if kind is Node:
            return self._twins[value]
        if is_written(value, nested=nested):
            return value
        if isinstance(value, list):
            return [self.of(item, nested=nested) for item in cast(list[Any], value)]
        if kind is tuple:
            return tuple([self.of(item, nested=nested) for item in value])
        if kind is slice:
            return slice(*[self.of(item, nested=nested) for item in (value.start, value.stop, value.step)])
        if isinstance(value, dict):
            return self._dict(cast(dict[Any, Any], value))
        return self._tuple(cast(tuple[Any, ...], value), nested) if isinstance(value, tuple) else self._constant(value)

    def _tuple(self, value: tuple[Any, ...], nested: bool) -> Any:
        # Of a class of its own. torch.fx keeps named tuples, outside of dicts and of each other.
        kind: Any = type(value)
        is_named = hasattr(value, "_fields")
        if is_named and not nested and self.function(kind) is kind:
            return kind(*[self.of(item, nested=True) for item in value])
        found: dict[Node, None] = {}
        collect_nodes(value, found)
        if not found:
            return self._constant(value)
        items = tuple([self.of(item) for item in value])
        return self._helper("built", "call_function", self.function(kind), items if is_named else (items,), "tuple_1")

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        for key in value:
            if not is_written(key, nested=True):
                raise ArgumentTypeError(
                    f"a dict has the key {key!r}, which torch.fx's code does not write as what it is; use a string"
                )
        return {key: self.of(item, nested=True) for key, item in value.items()}

    def _constant(self, value: Any) -> torch.fx.Node:
        known = self._constants.get(id(value))
        if known is not None:
            return known
        if isinstance(value, nn.Module) or self._module is None:
            next_step = "register it in the module and read it with graph.get_attr(path)"
            if not isinstance(value, nn.Module):
                next_step = "convert the GraphModule, which can keep it as an attribute"
            raise ArgumentTypeError(f"an argument is a {type(value).__name__}, which no code can write; {next_step}")
        name = self._module.name_of_literal(value) if isinstance(value, torch.Tensor) else None
        if name is not None:
            value_now = getattr(self._module, name)  # which may have followed the module to a device
        else:
            name, value_now = self._free_attribute(value, self._module), value
        self.attributes[name] = value_now
        helper = self._constants[id(value)] = self._helper("constant", "get_attr", name, (), name)
        return helper

    def _free_attribute(self, value: Any, module: GraphModule) -> str:
        stem = "_tensor_constant" if isinstance(value, torch.Tensor) else "_constant"
        numbered = (f"{stem}{number}" for number in self._numbers[stem])
        return next(name for name in numbered if name not in self.attributes and not hasattr(module, name))

    def _helper(self, kind: str, op: str, target: Any, args: tuple[Any, ...], stem: str) -> torch.fx.Node:
        helper = add_node(self._result, op, target, args, {}, self._free_name(stem))
        helper.meta[HELPER] = kind
        return helper

    def _free_name(self, stem: str) -> str:
        name = stem
        for number in itertools.count(1):
            if name not in self._names:
                break
            name = f"{stem}_{number}"
        self._names.add(name)
        return name


def add_node(
    graph: torch.fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    kind: Any = None,
) -> torch.fx.Node:
    """Add a node of this name and type to the end of `graph`."""
    node = graph.create_node(op, target, args, kwargs, name, kind)
    node.name = name  # whatever torch.fx makes of it: its code finds free names anyway
    return node
