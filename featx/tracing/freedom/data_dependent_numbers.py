"""Numbers that do not follow from the sizes of the inputs.

`scores.argmax().item()`, the length of what `nonzero` gives, and `x.stride(0)` are such numbers.

C code reads them and says nothing: `self.layers[n]` records no node and no guard. Sizes that follow from those of the
inputs are told by traces at other sizes (`variation.py`). These numbers are not, so the model runs once more on the
same inputs, with other numbers in their place.
"""

from __future__ import annotations

from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.guards.disguises import Disguise, disguise_as_larger, disguise_as_zero, disguises_in_reverse
from featx.tracing.guards.guards import add_check, check_decision
from featx.tracing.guards.scalars import plain_number
from featx.tracing.history.lineage import Origin, source_node
from featx.tracing.recording.numbers import READS_NUMBERS
from featx.tracing.sizes.same_needed import matches_needed_nodes
from featx.tracing.stand_ins.stand_ins import keeps_values
from featx.tree import tensors_in

_OF_MEMORY = ("stride", "storage_offset")


def pin_data_dependent_numbers(request: TraceRequest, trace: ExampleTrace) -> None:
    """Add checks that numbers from values are what they were, where the model does something else with other ones.

    Some more runs where there are such numbers (two, and those of `disguises_in_reverse`); else none. The graph of
    `trace` is changed.
    """
    of_values, followed = _nodes_of_values(trace.graph), _followed_like_sizes(request, trace)
    sources = list(map(source_node, trace.numbers.origins))
    found = [
        place
        for place, node in enumerate(sources)
        if node in of_values or ("effects" in node.meta and place not in followed)  # a call has returned it
    ]
    if not found:
        return
    numbers = [plain_number(trace.numbers.values[place]) for place in found]
    numbers += [number for number, node in trace.numbers.computed if node in of_values]
    # Large: `items[:n]` is everything. Zero: it is nothing. In reverse: `items[a:b]` that was empty is not.
    disguises = (disguise_as_larger, disguise_as_zero, *disguises_in_reverse(numbers))
    if all(_does_the_same(request, trace, frozenset(found), each) for each in disguises):
        return
    for place in found:
        _pin(trace.graph, trace.numbers.origins[place], trace.numbers.values[place])


def _followed_like_sizes(request: TraceRequest, trace: ExampleTrace) -> frozenset[int]:
    """Return the places of ints that calls can only have made of sizes, and that runs at other sizes have followed.

    Such as the height and width that a stage of SegFormer returns beside its tokens. There are none where the trace
    knows values of inputs.
    """
    if trace.is_real or any(map(keeps_values, tensors_in((request.args, request.kwargs)))):
        return frozenset()
    values = trace.numbers.values
    return frozenset(place for place in trace.numbers.shown_otherwise if isinstance(plain_number(values[place]), int))


def _does_the_same(request: TraceRequest, trace: ExampleTrace, disguised: frozenset[int], disguise: Disguise) -> bool:
    for is_real in (False, True) if trace.is_real else (False,):
        conditions = Conditions(
            f"other numbers from values, shown by {disguise.__name__}", is_real, gradients=trace.gradients,
            earlier=trace, disguise=disguise, disguised=disguised,
        )  # fmt: skip
        again = request.attempt(trace, conditions)
        if again is not None and matches_needed_nodes(again, trace):
            return True
    return False


def _nodes_of_values(graph: Graph) -> set[Node]:
    """Return the nodes of numbers, and of what they are taken out of, that depend on values or on strides. O(nodes)."""
    of_values: set[Node] = set()
    for node in graph.nodes:
        is_reader = node.op == "call_method" and node.target in (*READS_NUMBERS, *_OF_MEMORY)
        if is_reader or node.meta.get("has_dynamic_shape") or not of_values.isdisjoint(node.all_input_nodes):
            of_values.add(node)
    return of_values


def _pin(graph: Graph, origin: Origin, value: int | float) -> None:
    node = _taken_out(graph, origin)
    with graph.inserting_after(node):
        what = "a number that the model reads from tensor values and uses in Python"
        add_check(graph, check_decision, node, value, what)


def _taken_out(graph: Graph, origin: Origin) -> Node:
    if isinstance(origin, Node):
        return origin
    if origin.node is not None and not origin.node.is_erased:
        return origin.node
    owner = _taken_out(graph, origin.owner)
    with graph.inserting_after(owner):
        return graph.call_function(origin.function, (owner, origin.key))
