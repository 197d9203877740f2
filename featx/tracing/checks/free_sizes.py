"""Find out which dimensions of the inputs a trace leaves open, by tracing at other sizes and comparing.

Sizes that the model turns into lists, loops or indices leave no node behind. So where Python has seen a size, the model
is traced again with other ones: a dimension for which the graph stays the same is free, one for which it changes, or
which the model refuses to change, is fixed and checked at run time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from featx.errors import TraceError
from featx.ir.equality import is_same_graph
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.libraries import advice_for_sizes
from featx.tracing.calls.tensor_reads import ABOUT_GRADIENTS
from featx.tracing.checks.data_dependent_numbers import pin_data_dependent_numbers
from featx.tracing.checks.early_stop import go_on_where_needed
from featx.tracing.checks.free_dtypes import follow_dtypes
from featx.tracing.checks.outcomes import (
    FREE,
    LAYOUT_NOT_VARIED,
    NOT_EMPTY,
    STALE,
    TOGETHER,
    UNTRIED,
    FreeDims,
    Outcome,
)
from featx.tracing.checks.repetition import check_repeats
from featx.tracing.checks.stale_caches import stale_dims
from featx.tracing.checks.variation import Dim, Variation, can_be_resized, measures_of
from featx.tracing.environment.raised_errors import free_frames
from featx.tracing.example.conditions import Conditions, RequestedNodeFinder, count_needed
from featx.tracing.example.dict_inputs import without_unread_items
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.guards.guards import check_rank, check_size
from featx.tracing.objects.structure import Path, leaves_of, text_of
from featx.tracing.replica.mode_reads import ModeReads, set_mode
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.signals import (
    GAVE_UP,
    DependsOnAutocast,
    InternalTraceError,
    NeedsRealValues,
    ReadInNextCall,
    SubmoduleNotRepeatable,
    ThreadInterference,
)

# How the name begins under which a trace notes that later calls would use a cache of this one, with old values.
CACHE_OF_ONE_LENGTH = "a cache for length"
# An input: its name, where it is (a placeholder and the way to it from there), and the tensor.
_Input = tuple[str, tuple[Node, Path], torch.Tensor]


@dataclass
class OtherMode:
    """What a trace in train or eval mode found out, for one of the same model on the same inputs in the other mode.

    Attributes:
        dims: what is known of each dimension of the inputs.
        depends_on_autocast: whether forward sets or asks for the state of autocast, where that has to be observed.
        reads: observes whether anything asks for a mode, while the first of the two is traced.
        graph: what the model did in that mode, where nothing asked; it does the same in the other one.
        needed: how many of its nodes matter for what is wanted; None is all.
        before: the last trace in that mode, if its replica may be called again. `drop` ends that.
    """

    dims: dict[Dim, Outcome] = field(default_factory=lambda: dict[Dim, Outcome]())
    reads: ModeReads | None = None
    depends_on_autocast: bool = False
    graph: Graph | None = None
    needed: int | None = None
    before: ExampleTrace | None = None

    def trace(
        self, tracer: ExampleTracer, args: Any, kwargs: Any, find_requested: RequestedNodeFinder | None
    ) -> ExampleTrace | None:
        """Trace the next call of the replica, in this mode. None where that is not possible, or does something else."""
        before, self.before = self.before, None
        if before is None or self.graph is None or tracer.training is None:
            return None
        for module in before.replica.paths:
            set_mode(module, tracer.training)
        conditions = Conditions("the other mode", before.is_real, before.gradients, before=before)
        try:
            trace = tracer.run_once(before.model_context, args, kwargs, find_requested, conditions)
        except (ThreadInterference, *GAVE_UP):
            before.drop_replica()
            return None
        trace.needed = _needed(trace, find_requested)
        if self.does_the_same(trace):
            return trace
        trace.drop_replica()
        return None

    def drop(self) -> None:
        """Drop the replica, if there is one."""
        before, self.before = self.before, None
        if before is not None:
            before.drop_replica()

    def does_the_same(self, trace: ExampleTrace) -> bool:
        """Say whether what was found out holds for a trace in the other mode too."""
        if self.graph is None or trace.needed != self.needed:
            return False
        return is_same_graph(trace.graph, self.graph, first=self.needed)

    def forget(self) -> None:
        """Forget what the model does, since something has asked for a mode."""
        self.graph = None
        self.drop()

    def note(self, trace: ExampleTrace, dims: dict[Dim, Outcome]) -> None:
        """Keep what was found out, and the graph where nothing has asked for a mode so far."""
        self.dims.update(dims)
        self.graph = copy.deepcopy(trace.graph) if self.reads is not None and not self.reads.any else None
        self.needed = trace.needed


def trace_checked(
    tracer: ExampleTracer,
    root: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    find_requested: RequestedNodeFinder | None = None,
    other_mode: OtherMode | None = None,
) -> tuple[ExampleTrace, FreeDims]:
    """Trace `root` on an example and at other sizes; return the first trace, with checks of what is fixed.

    One trace where the model's own code sees no size, or where the other mode has told; else three, or two more for
    each group of dimensions where the model does not accept all changes at once. One more where it asks whether
    gradients are enabled, and four where it reads a dtype.

    Args:
        tracer: the tracer.
        root: the module or function.
        args: its arguments on the example, and `kwargs` those by name.
        kwargs: see there.
        find_requested: as for `ExampleTracer.trace`.
        other_mode: what was found out in train or eval mode; this mode's is put in its place.

    Raises:
        TraceError: the example cannot be traced.
        Exception: code of featx has failed at another size, an error that is not taken for a refusal of the model.
    """
    other_mode = other_mode or OtherMode()
    with tracer.log.request(type(root).__name__):
        try:
            return _trace_checked(tracer, root, args, kwargs, find_requested, other_mode)
        except TraceError:
            if not tracer.has_forgotten_caches:
                raise
            with tracer.keeping_caches():
                return _trace_checked(tracer, root, args, kwargs, find_requested, other_mode)


def trace_recording_mode_reads(
    tracer: ExampleTracer,
    root: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    find_requested: RequestedNodeFinder | None,
    known: OtherMode,
) -> tuple[ExampleTrace, FreeDims]:
    """Trace as `trace_checked`, and note in `known.reads` whether anything asks in which mode a module is.

    To notice it, modules have no attribute `training` meanwhile. Where that trace fails, another one is made with all
    attributes in place, which may work, or say better what is wrong; `known.reads` is None then.
    """
    tracer.reads = known.reads = ModeReads()
    try:
        return trace_checked(tracer, root, args, kwargs, find_requested, known)
    except Exception as error:
        free_frames(error)
    tracer.reads = known.reads = None
    return trace_checked(tracer, root, args, kwargs, find_requested, known)


def _trace_checked(
    tracer: ExampleTracer,
    root: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    find_requested: RequestedNodeFinder | None,
    other_mode: OtherMode,
) -> tuple[ExampleTrace, FreeDims]:
    args, kwargs = without_unread_items(root, args, kwargs)
    tracer.keeps_replicas = True
    tracer.observes_autocast = tracer.observes_autocast or other_mode.depends_on_autocast
    trace = other_mode.trace(tracer, args, kwargs, find_requested)
    # What a second call does, and other sizes change, the other mode has told then.
    is_known = trace is not None
    can_go_on = False
    try:
        while trace is None:
            trace = tracer.trace(root, args, kwargs, find_requested)
            if not torch.is_grad_enabled() and _asks_for_gradients(trace.graph):
                trace = _in_gradient_mode_of_caller(tracer, args, kwargs, trace, find_requested)
            if find_requested is not None and trace.early_stop_reason is not None:
                trace = go_on_where_needed(tracer, args, kwargs, trace, find_requested)
            trace.needed = _needed(trace, find_requested)
            is_known = other_mode.does_the_same(trace)
            try:
                can_go_on = not is_known and check_repeats(tracer, args, kwargs, trace, find_requested)
            except (SubmoduleNotRepeatable, ReadInNextCall, DependsOnAutocast) as signal:
                _set_up_for(signal, tracer, other_mode)
                trace.drop_replica()
                trace = None
        free = _free_dims(
            tracer, (args, kwargs), trace, find_requested, other_mode, is_known=is_known, can_go_on=can_go_on
        )
        return trace, free
    except InternalTraceError as fault:
        raise fault.error from None
    finally:
        tracer.keeps_replicas = False
        if trace is not None and other_mode.before is None:
            trace.drop_replica()


def _set_up_for(
    signal: SubmoduleNotRepeatable | ReadInNextCall | DependsOnAutocast, tracer: ExampleTracer, other_mode: OtherMode
) -> None:
    """Let further traces run as the comparison with a second call has asked for."""
    if isinstance(signal, SubmoduleNotRepeatable):
        tracer.whole[signal.path] = signal.reason
    elif isinstance(signal, ReadInNextCall):
        tracer.read_first |= signal.attributes
    else:
        tracer.observes_autocast = other_mode.depends_on_autocast = True


def _free_dims(
    tracer: ExampleTracer,
    example: tuple[tuple[Any, ...], Mapping[str, Any]],
    trace: ExampleTrace,
    find_requested: RequestedNodeFinder | None,
    other_mode: OtherMode,
    *,
    is_known: bool,
    can_go_on: bool,
) -> FreeDims:
    """Find out what holds beyond the example, and add checks of what does not to the graph of `trace`."""
    args, kwargs = example
    inputs = list(_tensors(trace, args, kwargs))
    before = trace if can_go_on and not trace.is_real else None
    known = {(id(tensor), dim): UNTRIED for _, _, tensor in inputs for dim in range(tensor.dim())}
    measured = measures_of(trace.graph)
    if is_known:
        known = {dim: other_mode.dims[dim] for dim in known}
    elif trace.numbers.sizes_were_read or trace.is_real:
        variation = Variation(tracer, args, kwargs, trace, find_requested, before=before)
        varied = [tensor for _, _, tensor in inputs if can_be_resized(tensor)]
        known = {**dict.fromkeys(known, LAYOUT_NOT_VARIED), **variation.test(varied, other_mode.dims)}
        before = variation.before
        if trace.has_filled_caches:
            known.update(stale_dims(variation))
    trace.checks.left.update(_caches_of_one_length(inputs, known))
    other_mode.note(trace, known)
    if trace.is_real and not tracer.runs_sizes_for_real:  # the other mode may find more dimensions free
        other_mode.graph = None
    if measures_of(trace.graph) != measured:  # other sizes told more of some calls, which may differ by mode
        other_mode.graph = None
    pin_data_dependent_numbers(tracer, args, kwargs, trace, find_requested)
    needless = _needless_gradient_checks(tracer, args, kwargs, trace, find_requested)
    follow_dtypes(tracer, args, kwargs, trace, find_requested)
    for check in needless:
        (question,) = check.all_input_nodes
        trace.graph.erase_node(check)
        trace.graph.erase_node(question)
    free = FreeDims({name: [known[id(tensor), dim] for dim in range(tensor.dim())] for name, _, tensor in inputs})
    _check_inputs(trace, inputs, known, advice_for_sizes(trace.model_context.traced))
    other_mode.before = before if other_mode.graph is not None else None
    return free


def _caches_of_one_length(inputs: list[_Input], known: Mapping[Dim, Outcome]) -> Iterator[Attribute]:
    """Yield what a call leaves that later calls with other lengths would use: such cases must not be mixed."""
    for name, _, tensor in inputs:
        for dim, size in enumerate(tensor.shape):
            if known[id(tensor), dim] == STALE:
                yield "", f"{CACHE_OF_ONE_LENGTH} {size} of dimension {dim} of input '{name}'"


def _needed(trace: ExampleTrace, find_requested: RequestedNodeFinder | None) -> int | None:
    """Return how many nodes of a trace matter for what is wanted, if there will be further runs; None is all."""
    has_further_runs = (
        trace.numbers.sizes_were_read or trace.is_real or trace.gradient_checks or trace.recorder.dtype_checks
    )
    if find_requested is None or not has_further_runs:
        return None
    return count_needed(trace.graph, find_requested)


def _asks_for_gradients(graph: Graph) -> bool:
    attributes = {node.args[1] for node in graph.find_nodes(op="call_function", target=getattr)}
    return bool(graph.find_nodes(op="call_function", target=torch.is_grad_enabled) or attributes & ABOUT_GRADIENTS)


def _in_gradient_mode_of_caller(
    tracer: ExampleTracer, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: ExampleTrace, find_requested: Any
) -> ExampleTrace:
    """Return `trace`, for which gradients are on, or one without them if the model does something else then.

    A trace with gradients sees where the model switches them off, so it is the one to keep where both are the same.
    """
    if not trace.gradients or (
        trace.gradient_checks and _needless_gradient_checks(tracer, args, kwargs, trace, find_requested)
    ):
        return trace
    conditions = Conditions("the example, gradients off", trace.is_real, gradients=False)
    try:
        without = tracer.run_once(trace.model_context, args, kwargs, find_requested, conditions)
    except (NeedsRealValues, Exception):
        return trace
    trace.drop_replica()
    return without


def _needless_gradient_checks(
    tracer: ExampleTracer, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: ExampleTrace, find_requested: Any
) -> list[Node]:
    """Return the checks of the gradient mode, if the model does the same in the other one."""
    checks = trace.gradient_checks
    if not checks or not trace.gradients:
        return []
    conditions = Conditions("gradients off", trace.is_real, gradients=False, earlier=trace)
    try:
        again = tracer.run_once(trace.model_context, args, kwargs, find_requested, conditions)
    except GAVE_UP:
        return []
    is_same = is_same_graph(again.graph, trace.graph, besides=frozenset(checks), first=trace.needed)
    return checks if is_same else []


def _tensors(trace: ExampleTrace, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[_Input]:
    bound = trace.model_context.signature.bind(*args, **kwargs)
    nodes = {node.target.lstrip("*"): node for node in trace.graph.nodes if node.op == "placeholder"}
    for name, value in bound.arguments.items():
        for leaf, path in leaves_of(value):
            if isinstance(leaf, torch.Tensor):
                yield name + text_of(path), (nodes[name], path), leaf


def _check_inputs(trace: ExampleTrace, inputs: list[_Input], known: Mapping[Dim, Outcome], way_out: str) -> None:
    graph = trace.graph
    # Behind the checks of what the inputs are.
    first = next(node for node in graph.nodes if node.op != "placeholder" and not node.meta.get("is_check_of_input"))
    with graph.inserting_before(first):
        for name, (placeholder, path), tensor in inputs:
            checks: list[tuple[Any, ...]] = []
            if trace.numbers.shapes_were_read:
                checks.append((check_rank, tensor.dim(), f"input '{name}'"))
            for dim, size in enumerate(tensor.shape):
                reason = known[id(tensor), dim]
                if reason in (FREE, TOGETHER, UNTRIED) or (reason == NOT_EMPTY and size == 0):
                    continue
                expected = None if reason == NOT_EMPTY else size
                what = f"input '{name}' is {reason}{way_out if reason.is_refusal else ''}"
                checks.append((check_size, dim, expected, what))
            node = placeholder
            for function, key in path if checks else ():
                node = graph.call_function(function, (node, key))
            for function, *arguments in checks:
                check = graph.call_function(function, (node, *arguments))
                check.meta["is_guard"] = True
