"""Follow the dtypes that a model reads, by tracing it in other dtypes too.

A dtype is one object for all tensors, so nothing tells which of them a model got one from. But a model that reads none
cannot know in which dtype it runs. So where it has read one, it is traced as it would be after `half()`, `bfloat16()`,
`double()` or `float()`. Graphs that are the same but for constants become one. In it, each of those constants is looked
up by the first dtype that was read, and all others that were read are checked to be what they were in that trace.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from featx.ir.arguments import Argument, map_aggregate
from featx.ir.equality import first_nodes, is_same, nodes_with_other_constants
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.rewiring import keep_measured_effects
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.guards.guards import check_decision, check_dtype
from featx.tracing.sizes.same_needed import join_measured, requested_places_match
from featx.tree import tensors_in, tree_map

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_CONSTANTS = frozenset({torch.dtype, float, int})


@dataclass(frozen=True)
class OtherDtypes:
    """What traces in other dtypes found.

    Attributes:
        graphs: the graphs that are the same as that of the example but for constants.
        places: at which places in it the nodes are that have other constants.
    """

    graphs: list[Graph]
    places: frozenset[int]


def follow_dtypes(request: TraceRequest, trace: ExampleTrace, known: OtherDtypes | None = None) -> OtherDtypes:
    """Let the graph of `trace` hold in other dtypes than that of the example, where the model does the same there.

    Three or four traces more where the model has read a dtype, on tensors without values; none elsewhere. What it asks
    of values is answered as on the example. Where no other dtype gives this graph, it goes on to be for that of the
    example.

    Args:
        request: what is traced, on the example.
        trace: the trace, whose graph is changed.
        known: what was found of another trace whose graph is the same in the nodes that these graphs were compared in.

    Returns:
        What was found.
    """
    checks = dtype_checks(trace.graph).intersection(first_nodes(trace.graph, trace.needed))
    found = known or (_other_dtypes(request, trace) if checks else OtherDtypes([], frozenset()))
    if found.places:
        nodes = first_nodes(trace.graph, trace.needed)
        _merge([trace.graph, *found.graphs], {nodes[place] for place in found.places}, checks, trace.needed)
    return found


def _other_dtypes(request: TraceRequest, trace: ExampleTrace) -> OtherDtypes:
    graphs, differing = list[Graph](), set[Node]()
    present = {leaf.dtype for leaf in tensors_in((request.args, request.kwargs))}
    present |= {tensor.dtype for tensor in trace.model_context.root.parameters()}
    present = {dtype for dtype in present if dtype.is_floating_point}
    for dtype in _DTYPES:
        if present == {dtype}:
            continue  # that is the example
        other = _traced_in(dtype, request, trace)
        found = None if other is None else nodes_with_other_constants(trace.graph, other, _CONSTANTS, trace.needed)
        if other is not None and found:
            graphs.append(other)
            differing.update(found)
    places = (place for place, node in enumerate(first_nodes(trace.graph, trace.needed)) if node in differing)
    return OtherDtypes(graphs, frozenset(places))


def dtype_checks(graph: Graph) -> set[Node]:
    """Return the checks of dtypes that the model has read. O(nodes)."""
    decisions = graph.find_nodes(op="call_function", target=check_decision)
    return {check for check in decisions if isinstance(check.args[1], torch.dtype)}


def _traced_in(dtype: torch.dtype, request: TraceRequest, trace: ExampleTrace) -> Graph | None:
    """Return the graph in another dtype; None where the model does something else there, or refuses it."""
    made: dict[int, torch.Tensor] = {}

    def cast_to(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if id(value) not in made:
            made[id(value)] = torch.empty_like(value, dtype=dtype, device="meta")
        return made[id(value)]

    args, kwargs = tree_map(cast_to, (request.args, dict(request.kwargs)))
    reason = f"in {dtype}"
    conditions = Conditions(reason, is_real=False, gradients=trace.gradients, earlier=trace, dtype=dtype)
    other = request.on(args, kwargs).attempt(trace, conditions)
    if other is None or not requested_places_match(other, trace):
        return None
    return other.graph


def _merge(graphs: list[Graph], differing: set[Node], checks: set[Node], first: int | None) -> None:
    """Let constants of the first graph that are others in the other graphs follow the first dtype that is.

    `differing` are the nodes that have such constants, and `checks` those that check dtypes, in the first graph. The
    graphs are the same in their `first` nodes.
    """
    columns_of_nodes = [first_nodes(graph, first) for graph in graphs]
    rows = [row for row in zip(*columns_of_nodes, strict=False) if row[0] in differing]
    if rows[0][0] not in checks:
        return  # something else than a dtype tells the model in which it runs
    # Of graphs in which that check finds the same, the first.
    columns: dict[torch.dtype, int] = {}
    for column, check in enumerate(rows[0]):
        columns.setdefault(check.args[1], column)
    for column in columns.values():
        join_measured(graphs[0], graphs[column], first)
    lookups = _Lookups(rows[0][0], list(columns))
    for row in rows[1:]:
        lookups.replace_constants([row[column] for column in columns.values()])


class _Lookups:
    """Constants of a graph that depend on the dtype that is checked by `check`, which from now on allows all these."""

    def __init__(self, check: Node, dtypes: list[torch.dtype]) -> None:
        self._graph, self._dtypes = check.graph, dtypes
        self._read = check.all_input_nodes[0]
        with self._graph.inserting_before(check):
            self._last = self._graph.call_function(check_dtype, (self._read, dtypes, check.args[2]))
        self._last.meta = check.meta
        self._graph.erase_node(check)
        # Constants, as they are in each of the dtypes, and what stands for them.
        self._known: dict[str, Node] = {repr(dtypes): self._read}

    def replace_constants(self, row: list[Node]) -> None:
        """Replace the constants of the first of these nodes that are others in the further ones, one for each dtype."""
        node = row[0]
        leaves = zip(*(_leaves(each) for each in row), strict=True)

        def replaced(_: Argument) -> Argument:
            values = next(leaves)
            if isinstance(values[0], Node) or all(is_same(values[0], value) for value in values[1:]):
                return values[0]
            return self._lookup(values)

        inputs = node.all_input_nodes
        node.args, node.kwargs = map_aggregate(node.args, replaced), map_aggregate(node.kwargs, replaced)
        keep_measured_effects(node, [*inputs])

    def _lookup(self, values: tuple[Any, ...]) -> Node:
        key = repr(list(values))
        if key not in self._known:
            with self._graph.inserting_after(self._last):
                table = dict(zip(self._dtypes, values, strict=True))
                lookup = self._graph.call_function(operator.getitem, (table, self._read), name="by_dtype")
            self._known[key] = lookup
            self._known[key].meta["nn_module_stack"] = self._last.meta["nn_module_stack"]
            self._last = self._known[key]
        return self._known[key]


def _leaves(node: Node) -> list[Argument]:
    found: list[Argument] = []

    def note(leaf: Argument) -> Argument:
        found.append(leaf)
        return leaf

    map_aggregate((node.args, node.kwargs), note)
    return found
