"""Find out whether the model does the same with gradients switched off, where it asks whether they are enabled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from featx.ir.equality import is_same_graph
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.calls.tensor_reads import ABOUT_GRADIENTS
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.signals import GAVE_UP, NeedsRealValues


def asks_for_gradients(graph: Graph) -> bool:
    """Say whether the model asked whether gradients are enabled, or read what depends on it, such as `grad_fn`."""
    attributes = {node.args[1] for node in graph.find_nodes(op="call_function", target=getattr)}
    return bool(graph.find_nodes(op="call_function", target=torch.is_grad_enabled) or attributes & ABOUT_GRADIENTS)


def in_gradient_mode_of_caller(
    tracer: ExampleTracer, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: ExampleTrace, find_requested: Any
) -> ExampleTrace:
    """Return `trace`, for which gradients are on, or one without them if the model does something else then.

    A trace with gradients sees where the model switches them off, so it is the one to keep where both are the same.
    """
    if not trace.gradients or (
        trace.gradient_checks and needless_gradient_checks(tracer, args, kwargs, trace, find_requested)
    ):
        return trace
    conditions = Conditions("the example, gradients off", trace.is_real, gradients=False)
    try:
        without = tracer.run_once(trace.model_context, args, kwargs, find_requested, conditions)
    except (NeedsRealValues, Exception):
        return trace
    trace.drop_replica()
    return without


def needless_gradient_checks(
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
