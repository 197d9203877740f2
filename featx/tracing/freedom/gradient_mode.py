"""Find out whether the model does the same with gradients switched off, where it asks whether they are enabled."""

from __future__ import annotations

import torch

from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.calls.tensor_reads import ABOUT_GRADIENTS
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.guards.guards import check_decision
from featx.tracing.sizes.same_needed import matches_needed_nodes


def asks_for_gradients(graph: Graph) -> bool:
    """Say whether the model asked whether gradients are enabled, or read what depends on it, such as `grad_fn`.

    A graph asks too where the model switches them, and puts back later what it has found.
    """
    attributes = {node.args[1] for node in graph.find_nodes(op="call_function", target=getattr)}
    return bool(gradient_checks(graph) or attributes & ABOUT_GRADIENTS)


def in_gradient_mode_of_caller(request: TraceRequest, trace: ExampleTrace) -> ExampleTrace:
    """Return `trace`, for which gradients are on, or one without them if the model does something else then.

    A trace with gradients sees where the model switches them off, so it is the one to keep where both are the same.
    """
    if not trace.gradients or needless_gradient_checks(request, trace):
        return trace
    conditions = Conditions("the example, gradients off", trace.is_real, gradients=False)
    without = request.attempt(trace, conditions)
    if without is None:
        return trace
    trace.drop_replica()
    return without


def gradient_checks(graph: Graph) -> list[Node]:
    """Return the checks that gradients are enabled, or not, as they were when the model asked. O(nodes)."""
    questions = graph.find_nodes(op="call_function", target=torch.is_grad_enabled)
    return [check for question in questions for check in question.users if check.target is check_decision]


def needless_gradient_checks(request: TraceRequest, trace: ExampleTrace) -> list[Node]:
    """Return the checks of the gradient mode, if the model does the same in the other one."""
    checks = gradient_checks(trace.graph)
    if not checks or not trace.gradients:
        return []
    conditions = Conditions("gradients off", trace.is_real, gradients=False, earlier=trace)
    again = request.attempt(trace, conditions)
    if again is None:
        return []
    return checks if matches_needed_nodes(again, trace, frozenset(checks)) else []
