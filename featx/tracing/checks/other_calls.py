"""Find out whether what forward does with some inputs depends on an earlier call with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from featx.ir.equality import is_same_graph
from featx.tracing.environment.interrupts import free_frames
from featx.tracing.example.conditions import Conditions, RequestedNodeFinder, count_needed
from featx.tracing.example.dict_inputs import without_unread_items
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.guards.scalars import Diverged, TracedFloat, TracedInt
from featx.tracing.signals import NeedsRealValues, ThreadInterference

_NUMBERS = (TracedInt, TracedFloat)
_Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


def does_the_same_after(
    tracer: ExampleTracer, root: Any, inputs: _Inputs, earlier: _Inputs, find_requested: RequestedNodeFinder
) -> bool | None:
    """Say whether forward makes the same graph of `inputs` on a new replica and on one that had a call before.

    None where that cannot be traced. Three runs without values, and three on values where these need some.

    Args:
        tracer: the tracer.
        root: the model.
        inputs: arguments of it, by position and by name.
        earlier: those of the call before.
        find_requested: as for `ExampleTracer.trace`.
    """
    inputs, earlier = (without_unread_items(root, *each) for each in (inputs, earlier))
    tracer.keeps_replicas = True
    try:
        for is_real in (False, True):
            for gradients in (True,) if torch.is_grad_enabled() else (True, False):
                try:
                    return _is_unaffected(tracer, root, inputs, earlier, find_requested, is_real, gradients)
                except Diverged:
                    return False
                except (NeedsRealValues, ThreadInterference, Exception) as error:
                    free_frames(error)
        return None
    finally:
        tracer.keeps_replicas = False


def _is_unaffected(
    tracer: ExampleTracer, root: Any, inputs: _Inputs, earlier: _Inputs, find: RequestedNodeFinder,
    is_real: bool, gradients: bool,
) -> bool:  # fmt: skip
    context = tracer.context(root, *inputs)
    traces: list[ExampleTrace] = []

    def run(given: _Inputs, reason: str, finder: RequestedNodeFinder | None, before: ExampleTrace | None) -> Any:
        conditions = Conditions(reason, is_real, gradients, before=before)
        traces.append(tracer.run_once(context, *given, finder, conditions))
        return traces[-1]

    try:
        alone = run(inputs, "inputs of another kind", find, None)
        first = run(earlier, "a call before", None, None)
        if _leaves_numbers(first):
            return False
        after = run(inputs, "inputs of another kind, after that call", find, first)
        return is_same_graph(after.graph, alone.graph, first=count_needed(alone.graph, find))
    finally:
        for trace in traces:
            trace.drop_replica()


def _leaves_numbers(trace: ExampleTrace) -> bool:
    """Say whether forward has left a size, or another number that it was given: another call leaves another one."""
    states = filter(None, map(trace.checks.states.initial, trace.replica.paths))
    return any(isinstance(value, _NUMBERS) for state in states for _, value in state.assigned_values())
