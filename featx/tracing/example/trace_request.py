"""TraceRequest: what is traced on which example, and what is requested of it; it runs that under any conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from featx.tracing.example.conditions import Conditions, RequestedNodeFinder
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.signals import GAVE_UP


@dataclass(frozen=True)
class TraceRequest:
    """A model, its inputs, what is requested of it, and the tracer that runs it.

    Attributes:
        tracer: runs the model.
        root: the module or function.
        args: its arguments on the example.
        kwargs: inputs by name.
        find_requested: as for `ExampleTracer.trace`.
    """

    tracer: ExampleTracer
    root: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    find_requested: RequestedNodeFinder | None

    def on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TraceRequest:
        """Return the same request on other inputs."""
        return replace(self, args=args, kwargs=kwargs)

    def trace(self) -> ExampleTrace:
        """Trace the model on the example, for real only if it has to be; see `ExampleTracer.trace`."""
        return self.tracer.trace(self.root, self.args, self.kwargs, self.find_requested)

    def run(self, trace: ExampleTrace, conditions: Conditions) -> ExampleTrace:
        """Trace under some conditions, with all that is known of the model since `trace`; see `run_once`."""
        return self.tracer.run_once(trace.model_context, self.args, self.kwargs, self.find_requested, conditions)

    def attempt(self, trace: ExampleTrace, conditions: Conditions) -> ExampleTrace | None:
        """Do as `run`, or return None where the model does something else, fails, or needs values."""
        try:
            return self.run(trace, conditions)
        except GAVE_UP:
            return None
