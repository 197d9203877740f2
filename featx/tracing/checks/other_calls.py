"""Find out whether what forward does with some inputs depends on an earlier call with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from featx.ir.equality import is_same_graph
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.environment.raised_errors import free_frames
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.inputs.dict_inputs import without_unread_items
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.signals import Diverged, NeedsRealValues, ThreadInterference, WritesSharedTensor

_Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
_T = TypeVar("_T")


def does_the_same_after(
    tracer: ExampleTracer, root: Any, inputs: _Inputs, earlier: _Inputs, *, switches_mode: bool = False
) -> bool:
    """Say whether forward makes the same graph of `inputs` on a new replica and on one that had a call before.

    It has to leave the same too. False also where that cannot be traced to the end, and where a module of the model's
    own is kept whole, which may read what the call before has left. Three runs without values, and three on values
    where these need some.

    Args:
        tracer: the tracer.
        root: the model.
        inputs: arguments of it, by position and by name.
        earlier: those of the call before.
        switches_mode: that call is one in the other of train and eval mode.
    """
    inputs, earlier = (without_unread_items(root, *each) for each in (inputs, earlier))

    def run(is_real: bool, gradients: bool) -> bool:
        return _is_unaffected(tracer, root, inputs, earlier, is_real, gradients, switches_mode)

    return _first_that_runs(tracer, run) or False


def _first_that_runs(tracer: ExampleTracer, run: Callable[[bool, bool], _T | None]) -> _T | None:
    """Return what `run` gives without values, or with them where these are needed; None if no way works.

    Gradients are on whatever the caller has, but some models run without only.
    """
    with tracer.keeping_replicas():
        for is_real in (False, True):
            for gradients in (True,) if torch.is_grad_enabled() else (True, False):
                try:
                    return run(is_real, gradients)
                except Diverged:
                    return None
                except (NeedsRealValues, ThreadInterference, WritesSharedTensor, Exception) as error:
                    free_frames(error)
    return None


def _is_unaffected(
    tracer: ExampleTracer, root: Any, inputs: _Inputs, earlier: _Inputs, is_real: bool, gradients: bool,
    switches_mode: bool,
) -> bool:  # fmt: skip
    context = tracer.context(root, *inputs)
    traces: list[ExampleTrace] = []

    def run(given: _Inputs, reason: str, before: ExampleTrace | None) -> ExampleTrace:
        traces.append(tracer.run_once(context, *given, None, Conditions(reason, is_real, gradients, before=before)))
        return traces[-1]

    try:
        alone = run(inputs, "inputs of another kind", None)
        training = tracer.training
        try:
            tracer.training = not training if switches_mode and training is not None else training
            first = run(earlier, "a call before", None)
        finally:
            tracer.training = training
        if switches_mode and training is not None:
            first.replica.set_mode(training)
        if _leaves_numbers(first) or any(map(_keeps_own_module_whole, traces)):
            return False
        after = run(inputs, "inputs of another kind, after that call", first)
        leaves_more = after.checks.left - alone.checks.left - first.checks.left
        return not leaves_more and is_same_graph(after.graph, alone.graph)
    finally:
        for trace in traces:
            trace.drop_replica()


def assigned_by_two_calls(tracer: ExampleTracer, root: Any, inputs: _Inputs) -> set[Attribute] | None:
    """Return the attributes that a call of forward and a further one have assigned; None if that is not known.

    All modules are looked into. Two runs without values, and two on values where these need some.
    """
    inputs = without_unread_items(root, *inputs)

    def run(is_real: bool, gradients: bool) -> set[Attribute] | None:
        context = tracer.context(root, *inputs)
        traces: list[ExampleTrace] = []
        try:
            for _ in range(2):
                before = traces[-1] if traces else None
                conditions = Conditions("a call in the other mode", is_real, gradients, before=before)
                traces.append(tracer.run_once(context, *inputs, None, conditions))
            if any(map(_keeps_own_module_whole, traces)):
                return None
            return set().union(*map(attributes_assigned_in, traces))
        finally:
            for trace in traces:
                trace.drop_replica()

    return _first_that_runs(tracer, run)


def attributes_assigned_in(trace: ExampleTrace) -> set[Attribute]:
    """Return the attributes that forward has assigned in a trace, or changed in place."""
    states = ((trace.checks.states.initial(module), path) for module, path in trace.replica.paths.items())
    return {(path, place.name) for state, path in states if state is not None for place, _ in state.assigned_values()}


def _keeps_own_module_whole(trace: ExampleTrace) -> bool:
    modules = {path: module for module, path in trace.replica.paths.items()}
    return any(not is_torch_layer(type(modules[path])) for path in trace.checks.opaque_paths)


def _leaves_numbers(trace: ExampleTrace) -> bool:
    """Say whether forward has left a size, or another number that it was given: another call leaves another one."""
    states = filter(None, map(trace.checks.states.initial, trace.replica.paths))
    return any(isinstance(value, TracedNumber) for state in states for _, value in state.assigned_values())
