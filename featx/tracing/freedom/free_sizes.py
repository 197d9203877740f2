"""Find out which dimensions of the inputs a trace leaves open, by tracing at other sizes and comparing.

Sizes that the model turns into lists, loops or indices leave no node behind. So where Python has seen a size, the model
is traced again with other ones: a dimension for which the graph stays the same is free, one for which it changes, or
which the model refuses to change, is fixed and checked at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from featx.ir.ancestors import with_ancestors
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.libraries import advice_for_sizes
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.freedom.data_dependent_numbers import pin_data_dependent_numbers
from featx.tracing.freedom.free_dtypes import OtherDtypes, follow_dtypes
from featx.tracing.freedom.gradient_mode import needless_gradient_checks
from featx.tracing.freedom.other_mode import OtherMode
from featx.tracing.freedom.stale_caches import pin_dtypes_of_caches, stale_dims
from featx.tracing.guards.guards import add_check, check_decision, check_is_tensor, check_rank, check_size
from featx.tracing.objects.structure import Path, leaves_of, text_of
from featx.tracing.side_effects.left import Left
from featx.tracing.sizes.compared_sizes import compared_dims, matched_dims
from featx.tracing.sizes.outcomes import LAYOUT_NOT_VARIED, NOT_EMPTY, STALE, UNTRIED, FreeDims, Outcome
from featx.tracing.sizes.resizing import Dim, can_be_resized
from featx.tracing.sizes.same_needed import measures_of
from featx.tracing.sizes.variation import Variation
from featx.tracing.source_uses.code_queries import asks_for_kind_of_device, asks_for_type_of_tensor

# An input: its name, where it is (a placeholder and the way to it from there), and the tensor.
_Place = tuple[Node, Path]
_Input = tuple[str, _Place, torch.Tensor]
# A dimension of an input: its name, where it is, and the position.
_Length = tuple[str, tuple[Node, Path], int]


def free_dims(
    request: TraceRequest, trace: ExampleTrace, other_mode: OtherMode, *, is_known: bool, can_go_on: bool
) -> FreeDims:
    """Find out what holds beyond the example, and add checks of what does not to the graph of `trace`."""
    inputs = list(_tensors(trace, request.args, request.kwargs))
    before = trace if can_go_on and not trace.is_real else None
    measured = measures_of(trace.graph)
    dtypes = other_mode.dtypes_for(trace) if is_known else None
    if _may_leave_out_calls(trace):  # if their results have the same form at all sizes
        trace.numbers.sizes_were_read = trace.numbers.shapes_were_read = True
    if is_known and not other_mode.refuses_samples():
        known = {dim: other_mode.dims[dim] for dim in _dims_of(inputs)}
        trace.cached = other_mode.cached
        trace.numbers.shown_otherwise = other_mode.shown_otherwise
    else:
        known, before = _try_sizes(request, trace, inputs, other_mode, before)
    trace.checks.left.update(_caches_of_one_length(inputs, known))
    other_mode.note(trace, known)
    if trace.is_real and not request.tracer.runs_sizes_for_real:  # the other mode may find more dimensions free
        other_mode.graph = None
    if measures_of(trace.graph) != measured:  # other sizes told more of some calls, which may differ by mode
        other_mode.graph = None
    other_mode.dtypes = _check_values_and_dtypes(request, trace, dtypes)
    free = FreeDims({name: [known[id(tensor), dim] for dim in range(tensor.dim())] for name, _, tensor in inputs})
    _check_inputs(trace, inputs, known, advice_for_sizes(trace.model_context.traced))
    if trace.numbers.shapes_were_read and UNTRIED not in known.values():
        _note_forms_compared(trace.graph)
    _check_ranks_of_results(trace.graph, were_read=trace.numbers.shapes_were_read)
    _check_kinds_of_inputs(trace, inputs)
    _check_numbers_of_parts(trace.graph)
    other_mode.before = before if other_mode.graph is not None else None
    return free


def _dims_of(inputs: list[_Input]) -> list[Dim]:
    return [(id(tensor), dim) for _, _, tensor in inputs for dim in range(tensor.dim())]


def _try_sizes(
    request: TraceRequest, trace: ExampleTrace, inputs: list[_Input], other_mode: OtherMode, before: ExampleTrace | None
) -> tuple[dict[Dim, Outcome], ExampleTrace | None]:
    """Trace at other sizes; return what was found of each dimension, and the last call on the replica of `before`."""
    if not (trace.numbers.sizes_were_read or trace.is_real):
        return dict.fromkeys(_dims_of(inputs), UNTRIED), before
    compared, matched = (_dims_at(find(trace), inputs) for find in (compared_dims, matched_dims))
    variation = Variation(request, trace, compared, matched, before=before)
    varied = [tensor for _, _, tensor in inputs if can_be_resized(tensor)]
    earlier = other_mode.dims or _dims_on_earlier_inputs(inputs, other_mode.on_earlier_inputs)
    is_first_in_mode = bool(other_mode.dims) and other_mode.on_earlier_inputs is None
    tested = variation.test(varied, earlier, other_mode=is_first_in_mode)
    known = {**dict.fromkeys(_dims_of(inputs), LAYOUT_NOT_VARIED), **tested}
    trace.numbers.shown_otherwise = variation.runs.shown_otherwise()
    before = variation.runs.before
    if trace.has_filled_caches:
        known.update(stale_dims(variation))
    return known, before


def _check_values_and_dtypes(request: TraceRequest, trace: ExampleTrace, known: OtherDtypes | None) -> OtherDtypes:
    """Add checks of numbers that were read from values, and of dtypes; take out needless ones of gradients.

    Returns what was found of other dtypes; `known` is that of the other mode, if it holds.
    """
    pin_data_dependent_numbers(request, trace)
    needless = needless_gradient_checks(request, trace)
    found = follow_dtypes(request, trace, known)
    pin_dtypes_of_caches(trace)
    for check in needless:
        (question,) = check.all_input_nodes
        trace.graph.erase_node(check)
        trace.graph.erase_node(question)
    return found


def _dims_at(places: Iterable[tuple[Node, int]], inputs: list[_Input]) -> set[Dim]:
    """Return the dimensions of inputs that are at some of the places, which may count them from the end."""
    tensors = {node: tensor for _, (node, path), tensor in inputs if not path}
    return {(id(tensors[node]), dim % max(tensors[node].dim(), 1)) for node, dim in places if node in tensors}


def _dims_on_earlier_inputs(inputs: list[_Input], found: FreeDims | None) -> dict[Dim, Outcome]:
    """Return what was found of the dimensions of earlier inputs, for those that have the same names now."""
    outcomes = {} if found is None else found.outcomes
    return {
        (id(tensor), dim): outcome
        for name, _, tensor in inputs
        for dim, outcome in enumerate(outcomes.get(name, ())[: tensor.dim()])
    }


def _caches_of_one_length(inputs: list[_Input], known: Mapping[Dim, Outcome]) -> Iterator[Left]:
    """Yield what a call leaves that later calls with other lengths would use: such cases must not be mixed."""
    for name, _, tensor in inputs:
        for dim, size in enumerate(tensor.shape):
            if known[id(tensor), dim] == STALE:
                text = f"a cache for length {size} of dimension {dim} of input '{name}'"
                yield Left("", text, is_for_one_length=True)


def _tensors(trace: ExampleTrace, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[_Input]:
    bound = trace.model_context.signature.bind(*args, **kwargs)
    nodes = {node.target.lstrip("*"): node for node in trace.graph.nodes if node.op == "placeholder"}
    for name, value in bound.arguments.items():
        for leaf, path in leaves_of(value):
            if isinstance(leaf, torch.Tensor):
                yield name + text_of(path), (nodes[name], path), leaf


def _check_kinds_of_inputs(trace: ExampleTrace, inputs: list[_Input]) -> None:
    """Add checks that inputs are on a device of the same kind, or have the same dtype, if code asks for it somewhere.

    Reads of `x.device.type` in one expression are checked where they are. A device that is kept in a variable, or
    passed on, is an object of torch, which tells nobody what it is asked. So is `torch.FloatTensor` in `isinstance`.
    """
    codes = trace.final_checks.codes_that_ran() if inputs else ()
    if any(map(asks_for_kind_of_device, codes)):
        for name, place, tensor in inputs:
            what = f"kind of device of input '{name}'"
            _check_of_input(trace.graph, place, ("device", "type"), tensor.device.type, what)
    if any(map(asks_for_type_of_tensor, codes)):
        for name, place, tensor in inputs:
            _check_of_input(trace.graph, place, ("dtype",), tensor.dtype, f"dtype of input '{name}'")


def _check_of_input(graph: Graph, place: _Place, attributes: tuple[str, ...], value: Any, what: str) -> None:
    with graph.inserting_before(_first_of_forward(graph)):
        node = _node_at(graph, place)
        for attribute in attributes:
            node = graph.call_function(getattr, (node, attribute))
        add_check(graph, check_decision, node, value, f"the {what}, for which the model's code asks")


def _may_leave_out_calls(trace: ExampleTrace) -> bool:
    """Say whether no requested value is computed from some call of which the form of the result follows from sizes."""
    results = [node.args[0] for node in trace.graph.nodes if node.meta.get("form_follows_from") == "sizes"]
    requested = trace.requested() if results else ()
    needed = with_ancestors(requested)
    return bool(requested) and any(
        isinstance(each, Node) and each not in needed and each < max(requested) for each in results
    )


def _note_forms_compared(graph: Graph) -> None:
    """Take note that runs at other sizes, where these are free, have shown the forms that follow from sizes."""
    for node in graph.nodes:
        if node.meta.get("form_follows_from") == "sizes":
            node.meta["form_follows_from"] = "nothing"


def _check_ranks_of_results(graph: Graph, *, were_read: bool) -> None:
    """Add checks of how many dimensions the tensors have that modules which are kept whole return, if code asks."""
    for check in graph.find_nodes(op="call_function", target=check_is_tensor) if were_read else ():
        source = check.args[0]
        if isinstance(source, Node) and "effects" in source.meta and "shape" in source.meta:
            with graph.inserting_after(check):
                added = add_check(graph, check_rank, source, len(source.meta["shape"]), check.args[1])
                added.meta["is_form_check"] = True
                if "form_follows_from" in check.meta:
                    added.meta["form_follows_from"] = check.meta["form_follows_from"]


def _check_numbers_of_parts(graph: Graph) -> None:
    """Add checks of how many tensors calls give that take a free length apart, where code unpacks these."""
    for node in [node for node in graph.nodes if node.meta.get("may_give_another_number")]:
        with graph.inserting_after(node):
            length = graph.call_function(len, (node,))
        with graph.inserting_after(length):
            what = f"how many tensors '{node.name}' gives, which forward unpacks"
            add_check(graph, check_decision, length, node.meta["unpacked_into"], what)


def _node_at(graph: Graph, place: tuple[Node, Path]) -> Node:
    """Return a node of what is at a place in an input, a new one inside of a container."""
    node, path = place
    for function, key in path:
        node = graph.call_function(function, (node, key))
    return node


def _first_of_forward(graph: Graph) -> Node:
    """Return the first node after the checks of what the inputs are."""
    return next(node for node in graph.nodes if node.op != "placeholder" and not node.meta.get("is_check_of_input"))


def _check_inputs(trace: ExampleTrace, inputs: list[_Input], known: Mapping[Dim, Outcome], way_out: str) -> None:
    graph = trace.graph
    tied: dict[int, list[_Length]] = {}
    with graph.inserting_before(_first_of_forward(graph)):
        for name, place, tensor in inputs:
            checks: list[tuple[Any, ...]] = []
            if trace.numbers.shapes_were_read:
                checks.append((check_rank, tensor.dim(), f"input '{name}'"))
            for dim, size in enumerate(tensor.shape):
                reason = known[id(tensor), dim]
                if reason.is_free and reason.tied:
                    tied.setdefault(reason.tied, []).append((name, place, dim))
                if reason.is_free and (reason != NOT_EMPTY or size == 0):
                    continue
                expected = None if reason == NOT_EMPTY else size
                what = f"input '{name}' is {reason}{way_out if reason.is_refusal else ''}"
                checks.append((check_size, dim, expected, what))
            node = _node_at(graph, place) if checks else None
            for function, *arguments in checks:
                add_check(graph, function, node, *arguments)
        for lengths in tied.values():
            _check_equal(graph, lengths)


def _check_equal(graph: Graph, lengths: list[_Length]) -> None:
    """Add checks that dimensions have one length, of which the model wants that and perhaps raises nothing."""
    (first_name, first_place, first_dim), *others = lengths
    expected = graph.call_method("size", (_node_at(graph, first_place), first_dim))
    for name, place, dim in others:
        length = graph.call_method("size", (_node_at(graph, place), dim))
        is_equal = graph.call_function(operator.eq, (length, expected))
        what = f"dimension {dim} of input '{name}' is as long as dimension {first_dim} of input '{first_name}'"
        add_check(graph, check_decision, is_equal, True, what)
