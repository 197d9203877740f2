"""Compute what a graph makes of sizes and constants alone, to compare two graphs by those values.

A table of positions is not computed from values of the inputs, so a trace without values can say what is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from featx.ir.arguments import map_arg
from featx.ir.effects import Effects
from featx.ir.form import sources_of_values
from featx.ir.memory import MemoryGroups
from featx.ir.node import Node
from featx.ir.operator_facts import facts_of_call, name_of
from featx.ir.paths import held_at
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.freedom.filled_caches import identity_of, views_for_their_form
from featx.tracing.guards.scalars import plain_number
from featx.tracing.history.lineage import Origin, Part
from featx.tree import tensors_in

# Larger tensors count as unknown.
_MOST_ELEMENTS = 50_000_000
_UNINITIALIZED = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())
_UNKNOWN = object()


class ConstantValues:
    """The values of the nodes of one graph that depend on no values of the inputs, as far as they can be computed.

    Args:
        trace: has the whole graph, of a call that is over.
        calls: numbers what is called with what, for all graphs that are compared.
        tensors: the values of tensors that stand in arguments, by their ids.
    """

    def __init__(self, trace: ExampleTrace, calls: dict[Any, int], tensors: Mapping[int, torch.Tensor]) -> None:
        graph, self._model = trace.graph, trace.model_context
        self._effects = Effects(graph, self._model.root)
        self._memory = MemoryGroups(graph, self._effects)
        # What calls write is computed on copies: the model is only read.
        self._written = self._memory.written()
        self._numbers = _numbers_by_node(trace)
        self._tensors = tensors
        self._numbers_of_calls = calls
        self._values: dict[Node, Any] = {}
        self._from_inputs: set[Node] = set()
        # By the group of memory, those of which any call writes.
        self._visited: dict[int, list[Node]] = {}
        # Nodes whose values are not known, as the numbers of their calls.
        self._calls: dict[Node, int] = {}
        # Those that are computed from values of the inputs, in order.
        self.steps: list[int] = []
        self._for_form = views_for_their_form(graph, self._effects)
        with torch.no_grad():
            for node in graph.nodes:
                self._visit(node)
                if (group := self._memory.of(node)) in self._written:
                    self._visited.setdefault(group, []).append(node)

    def of(self, origin: Origin) -> Any:
        """Return the value of a node or of a part of it; a marker if it is not known."""
        if isinstance(origin, Node):
            return self._values.get(origin, _UNKNOWN)
        if origin.node is not None and origin.node in self._values:
            return self._values[origin.node]
        owner = self.of(origin.owner)
        return _UNKNOWN if owner is _UNKNOWN else origin.function(owner, origin.key)

    def _visit(self, node: Node) -> None:
        if node.meta.get("is_guard"):
            return
        if node in self._numbers:
            self._values[node] = self._numbers[node]
            return
        if node.op == "placeholder" or not self._from_inputs.isdisjoint(sources_of_values(node)):
            self._from_inputs.add(node)
        elif node.op != "output" and (value := self._computed(node)) is not _UNKNOWN:
            self._values[node] = value
            return
        call = node.op, identity_of(node.target), self._key((node.args, node.kwargs))
        self._calls[node] = self._numbers_of_calls.setdefault(call, len(self._numbers_of_calls))
        if node.op == "output" or (node in self._from_inputs and node not in self._for_form):
            self.steps.append(self._calls[node])
        if node.op not in ("placeholder", "output"):
            self._note_writes(node)

    def _note_writes(self, writer: Node) -> None:
        """Let what shares the memory that an unknown call writes be unknown, and other values than before."""
        for group in self._memory.written_by(writer):
            for node in self._visited.get(group, ()):
                before = self._key(self._values.pop(node)) if node in self._values else self._calls.get(node)
                written = "written", self._calls[writer], before
                self._calls[node] = self._numbers_of_calls.setdefault(written, len(self._numbers_of_calls))
                if writer in self._from_inputs:
                    self._from_inputs.add(node)

    def _computed(self, node: Node) -> Any:
        if node.op == "get_attr":
            value = held_at(self._model.root, str(node.target))
            if not isinstance(value, torch.Tensor) or value.is_meta:
                return _UNKNOWN
            return value.clone() if self._memory.of(node) in self._written else value
        if node.target is getattr and node.args[1] == "device":
            return self._model.device
        effects = self._effects.of(node) if node.op in ("call_function", "call_method") else None
        if effects is None or effects.is_opaque or effects.is_random or effects.changes_global_state:
            return _UNKNOWN
        values = self._values_for(node)
        if values is None:
            return _UNKNOWN
        if facts_of_call(node).writes_first or "out" in node.kwargs:
            written = (node.args[0] if node.args else None, node.kwargs.get("out"))
            if any(id(leaf) not in self._tensors for leaf in tensors_in(written)):
                return _UNKNOWN  # a tensor that stands in the graph is not of this class
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = self._with_tensors(args), self._with_tensors(kwargs)
        if any(leaf.is_meta for leaf in tensors_in((args, kwargs))):
            return _UNKNOWN
        try:
            called: Any = node.target if node.op == "call_function" else getattr(args[0], str(node.target))
            value = called(*(args if node.op == "call_function" else args[1:]), **kwargs)
        except Exception:  # whatever a call does not take: the value is not known then
            return _UNKNOWN
        tensors = tensors_in(value)
        if name_of(node.target) in _UNINITIALIZED:  # what is in it is used nowhere
            for tensor in tensors:
                tensor.zero_()
        return _UNKNOWN if any(each.is_meta or each.numel() > _MOST_ELEMENTS for each in tensors) else value

    def _values_for(self, node: Node) -> dict[Node, Any] | None:
        """Return the values of what a node takes, zeros for an input of the form alone; None if one is not known."""
        needed = sources_of_values(node)
        values: dict[Node, Any] = {}
        for source in node.all_input_nodes:
            if source in self._values:
                values[source] = self._values[source]
            elif source not in needed and "shape" in source.meta:
                zero = torch.zeros((), dtype=source.meta["dtype"], device=self._model.device)
                values[source] = zero.expand(source.meta["shape"])
            else:
                return None
        return values

    def _with_tensors(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensors.get(id(value), value)
        if isinstance(value, (tuple, list)):
            items = [self._with_tensors(item) for item in cast(list[Any], value)]
            return type(value)(items) if type(value) in (tuple, list) else value
        if type(value) is dict:
            return {key: self._with_tensors(item) for key, item in cast(dict[Any, Any], value).items()}
        return plain_number(value)

    def _key(self, value: Any) -> Any:
        """Return what is equal for two arguments that are the same, whatever they were computed by."""
        if isinstance(value, Node):
            return self._key(self._values[value]) if value in self._values else ("call", self._calls[value])
        if isinstance(value, torch.Tensor):
            known = self._tensors.get(id(value), value)
            return ("tensor", id(value)) if known.is_meta else ("values", *_content_of(known))
        if isinstance(value, (tuple, list)):
            return tuple([self._key(item) for item in cast(list[Any], value)])
        if isinstance(value, dict):
            return tuple([(name, self._key(item)) for name, item in cast(dict[Any, Any], value).items()])
        if isinstance(value, slice):
            return "slice", self._key(value.start), self._key(value.stop), self._key(value.step)
        return type(plain_number(value)).__name__, identity_of(plain_number(value))


def _numbers_by_node(trace: ExampleTrace) -> dict[Node, int | float]:
    """Return the numbers that forward got by their nodes; those that no node stands for are used nowhere."""
    nodes = [origin.node if isinstance(origin, Part) else origin for origin in trace.numbers.origins]
    return {node: value for node, value in zip(nodes, trace.numbers.values, strict=True) if node is not None}


def _content_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    whole = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    data = whole.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
    return tensor.dtype, tuple(tensor.shape), hash(data.numpy().tobytes())
