"""Find out whether what forward does with some inputs depends on an earlier call with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from featx.ir.equality import is_same_graph
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.environment.raised_errors import free_frames
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.dict_inputs import without_unread_items
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.signals import Diverged, NeedsRealValues, ThreadInterference, WritesSharedTensor

_Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


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
    with tracer.keeping_replicas():
        for is_real in (False, True):
            for gradients in (True,) if torch.is_grad_enabled() else (True, False):
                try:
                    return _is_unaffected(tracer, root, inputs, earlier, is_real, gradients, switches_mode)
                except Diverged:
                    return False
                except (NeedsRealValues, ThreadInterference, WritesSharedTensor, Exception) as error:
                    free_frames(error)
    return False


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
        if any(map(_keeps_own_module_whole, traces)):
            return False
        hidden = _hide_numbers(first)
        if hidden is None:
            return False
        after = run(inputs, "inputs of another kind, after that call", first)
        if after.numbers.uses_earlier or after.numbers.compares_earlier:
            return False
        left = {each for each in after.checks.left if each.attribute not in hidden}
        leaves_more = left - alone.checks.left - first.checks.left
        return not leaves_more and is_same_graph(after.graph, alone.graph)
    finally:
        for trace in traces:
            trace.drop_replica()


class _Unusable:
    """Stands for a number that a call has left, where a later call may find another one: any use of it raises."""

    def _refuse(self, *_: Any) -> Any:
        raise Diverged

    __bool__ = __hash__ = __eq__ = __ne__ = __format__ = _refuse  # other operators are missing

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else Diverged


def _hide_numbers(trace: ExampleTrace) -> set[Attribute] | None:
    """Make the attributes unusable in which forward has left a size or another number: another call leaves another one.

    Returns:
        Which these are; None where such a number is inside a container that was there before.
    """
    found: set[Attribute] = set()
    for module, path in trace.replica.paths.items():
        state = trace.checks.states.initial(module)
        for (name, text), value in state.assigned_values() if state is not None else ():
            if isinstance(value, TracedNumber):
                if text != name:
                    return None
                module.__dict__[name] = _Unusable()
                found.add((path, name))
    return found


def _keeps_own_module_whole(trace: ExampleTrace) -> bool:
    modules = {path: module for module, path in trace.replica.paths.items()}
    return any(not is_torch_layer(type(modules[path])) for path in trace.checks.opaque_paths)
