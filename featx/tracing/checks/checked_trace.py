"""Trace a model on an example, and find out by further runs where the graph holds.

A second call must do the same, and the trace must have seen all that matters for what is requested. What depends on
sizes, dtypes, values and the gradient mode of the example is checked at run time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from featx.errors import TraceError
from featx.tracing.checks.early_stop import go_on_where_needed
from featx.tracing.checks.repetition import check_repeats
from featx.tracing.environment.raised_errors import free_frames
from featx.tracing.example.conditions import RequestedNodeFinder
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.freedom.free_sizes import free_dims
from featx.tracing.freedom.gradient_mode import asks_for_gradients, in_gradient_mode_of_caller
from featx.tracing.freedom.other_mode import OtherMode, count_needed_by_further_runs
from featx.tracing.inputs.dict_inputs import without_unread_items
from featx.tracing.nodes.scope import name_of_traced
from featx.tracing.replica.mode_reads import ModeReads
from featx.tracing.signals import (
    DependsOnGradients,
    InternalTraceError,
    ReadInNextCall,
    ReadsStored,
    SecondCallDiffers,
    SubmoduleNotRepeatable,
    Untraceable,
)
from featx.tracing.sizes.outcomes import FreeDims


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
    gradients are enabled, and three or four where it reads a dtype.

    Args:
        tracer: the tracer.
        root: the module or function.
        args: its arguments on the example.
        kwargs: inputs by name.
        find_requested: as for `ExampleTracer.trace`.
        other_mode: what was found out in train or eval mode; this mode's is put in its place.

    Raises:
        TraceError: the example cannot be traced.
        Exception: code of featx has failed at another size, an error that is not taken for a refusal of the model.
    """
    other_mode = other_mode or OtherMode()
    request = TraceRequest(tracer, root, args, kwargs, find_requested)
    with tracer.log.request(name_of_traced(root)), tracer.keeping_replicas():
        try:
            return _trace_checked(request, other_mode)
        except TraceError:
            if not tracer.has_forgotten_caches:
                raise
            with tracer.keeping_caches():
                return _trace_checked(request, other_mode)


def trace_recording_mode_reads(
    tracer: ExampleTracer,
    root: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    find_requested: RequestedNodeFinder | None,
    known: OtherMode,
) -> tuple[ExampleTrace, FreeDims]:
    """Trace as `trace_checked`, and note in `known.reads` whether anything asks in which mode a module is.

    To notice it, modules have no attribute `training` meanwhile. Where that trace fails, and not by code that cannot
    be followed, another one is made with all attributes in place, which may work, or say better what is wrong;
    `known.reads` is None then.
    """
    tracer.reads = known.reads = ModeReads()
    try:
        return trace_checked(tracer, root, args, kwargs, find_requested, known)
    except Exception as error:
        if isinstance(error.__cause__, Untraceable):  # which does not come from an attribute that is missing
            raise
        free_frames(error)
    tracer.reads = known.reads = None
    return trace_checked(tracer, root, args, kwargs, find_requested, known)


def _trace_checked(request: TraceRequest, other_mode: OtherMode) -> tuple[ExampleTrace, FreeDims]:
    request = request.on(*without_unread_items(request.root, request.args, request.kwargs))
    tracer = request.tracer
    tracer.observes_autocast = tracer.observes_autocast or other_mode.depends_on_autocast
    tracer.checks_gradient_mode = tracer.checks_gradient_mode or other_mode.depends_on_gradients
    trace = other_mode.trace(request)
    # What a second call does, and other sizes change, the other mode has told then.
    is_known = trace is not None
    can_go_on = False
    try:
        while trace is None:
            trace = _trace_of_all_that_matters(request)
            trace.needed = count_needed_by_further_runs(trace)
            is_known = other_mode.does_the_same(trace)
            try:
                can_go_on = not is_known and check_repeats(request, trace)
            except SecondCallDiffers as signal:
                _set_up_for(signal, tracer, other_mode)
                trace.drop_replica()
                trace = None
        if other_mode.keeps_first:
            other_mode.first = copy.deepcopy(trace.graph)
        return trace, free_dims(request, trace, other_mode, is_known=is_known, can_go_on=can_go_on)
    except InternalTraceError as fault:
        raise fault.error from None
    finally:
        if trace is not None and other_mode.before is None:
            trace.drop_replica()


def _trace_of_all_that_matters(request: TraceRequest) -> ExampleTrace:
    """Trace in the gradient mode that the model asks for, and to where nothing that follows matters."""
    trace = request.trace()
    try:
        while True:
            first = trace
            if not torch.is_grad_enabled() and asks_for_gradients(trace.graph):
                trace = in_gradient_mode_of_caller(request, trace)
            if trace.early_stop_reason is not None:
                trace = go_on_where_needed(request, trace)  # which may ask for the gradient mode
            if trace is first:
                return trace
    except BaseException:
        trace.drop_replica()
        raise


def _set_up_for(signal: SecondCallDiffers, tracer: ExampleTracer, other_mode: OtherMode) -> None:
    """Let further traces run as the comparison with a second call has asked for."""
    if isinstance(signal, SubmoduleNotRepeatable):
        tracer.opaque_reasons[signal.path] = signal.reason
    elif isinstance(signal, ReadInNextCall):
        tracer.read_first |= signal.attributes
    elif isinstance(signal, ReadsStored):
        tracer.stored_are_read = True
    elif isinstance(signal, DependsOnGradients):
        tracer.checks_gradient_mode = other_mode.depends_on_gradients = True
    else:
        tracer.observes_autocast = other_mode.depends_on_autocast = True
