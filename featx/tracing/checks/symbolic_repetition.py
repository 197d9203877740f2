"""Compare two symbolic calls of one replica, to find what a graph cannot repeat.

A symbolic trace knows only what `forward` does with proxies. It cannot see state that Python keeps from call to call,
nor decisions that involve no proxy. So `forward` runs a second time: it must record the same graph, and must not ask
for what only that call knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from types import CodeType, FrameType
from typing import Any

import torch

from featx.errors import ControlFlowError, TraceError
from featx.ir.equality import is_same_graph
from featx.ir.graph import Graph
from featx.tracing.environment.autocast_state import AUTOCAST_QUERIES
from featx.tracing.environment.profile_hook import ProfileHook
from featx.tracing.file_globals.caches import Caches
from featx.tracing.freedom.filled_caches import differ_only_by_caches, keeps_drawn_numbers
from featx.tracing.model_state.module_state import plain_attributes
from featx.tracing.objects.python_state import PythonState
from featx.tracing.replica.replica import Replica
from featx.tracing.source.frames import describe, is_library_code
from featx.tracing.source_uses.code_queries import asks_for_kind_of_variable, compares_objects
from featx.tracing.symbolic.tracer import Tracer

# What code may ask for that is not an input of the graph.
_MODE_QUERIES = AUTOCAST_QUERIES | {torch.is_grad_enabled, torch.is_inference_mode_enabled}
_ADVICE = "To go on, give example_inputs: then forward is followed on real inputs."


class SymbolicRepetition:
    """What has to be the same after each symbolic call of `replica`.

    Args:
        tracer: the tracer, whose name for the model the errors have.
        replica: the copy of the model that runs.
        caches: what the model's Python files hold.
    """

    def __init__(self, tracer: Tracer, replica: Replica, caches: Caches) -> None:
        self._tracer = tracer
        self._replica = replica
        self._caches = caches
        # The code that has run, and the first thing in it that is refused.
        self._seen: set[CodeType] = set()
        self._refused: TraceError | None = None

    def check(self, graph: Graph, call_again: Callable[[], Graph]) -> None:
        """Raise where a second call differs from the one that has recorded `graph`. O(nodes + modules).

        Args:
            graph: what the first call has recorded.
            call_again: runs forward again on the same replica, and returns its graph.

        Raises:
            TraceError: forward keeps state, or asks for something that a graph does not know.
        """
        states = self._states()
        self._caches.accept_plain_values()  # a flag that the first call alone sets is no state that later calls change
        hook = ProfileHook([self._on_call])
        try:
            if not hook.start():
                self._check_code()
            again = call_again()
        finally:
            hook.stop()
        if self._refused is not None:  # raised here, as code of the model may catch what a hook raises
            raise self._refused
        if self._states() != states or not (is_same_graph(graph, again) or self._only_fills_caches(graph, again)):
            raise self._error(
                "its second call runs other operations, or changes an object of Python again. It keeps a counter, an "
                "iterator, tensors of the last call or similar state, which a graph would not advance"
            )
        name = self._caches.changed_plain_value()
        if name is not None:
            raise self._error(f"forward changes the value {name} in its Python file or in a class in each call")

    def _only_fills_caches(self, graph: Graph, again: Graph) -> bool:
        root = self._replica.root
        return differ_only_by_caches(graph, again, {}, root) and not keeps_drawn_numbers(graph, again, {}, root)

    def _states(self) -> Mapping[str, Any]:
        state = PythonState()
        described = {path: state.of(plain_attributes(module)) for module, path in self._replica.paths.items()}
        return {**described, "files": tuple(map(state.of, self._caches.objects_now()))}

    def _on_call(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in self._seen:  # mostly it is
                self._seen.add(code)
                if not (is_library_code(code) or _is_generated(frame)):
                    self._refused = self._refused or self._question_in(code)
        elif event == "c_call" and called in _MODE_QUERIES and not is_library_code(frame.f_code):
            what = f"forward calls torch.{called.__name__}, whose answer may be another one when the graph runs,"
            self._refused = self._error(f"{what} {describe(frame)}", ControlFlowError)

    def _check_code(self) -> None:
        """Do what `_on_call` does, for the forward methods alone: another profiler has Python's hook."""
        for module in self._replica.paths:
            code = getattr(module.forward, "__code__", None)
            if code is not None and not is_library_code(code):
                self._refused = self._refused or self._question_in(code)

    def _question_in(self, code: CodeType) -> TraceError | None:
        """Return the error for code that may ask for what a proxy cannot answer."""
        place = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        if compares_objects(code):
            return self._error(f"{place} may use `is` to test whether a call returned its input", ControlFlowError)
        if asks_for_kind_of_variable(code):
            what = "may ask for the type of a traced value: type(), callable(), or `match`"
            return self._error(f"{place} {what}", ControlFlowError)
        return None

    def _error(self, what: str, kind: type[TraceError] = TraceError) -> TraceError:
        return kind(f"cannot trace {self._tracer.root_module_name} symbolically: {what}. {_ADVICE}")


def _is_generated(frame: FrameType) -> bool:
    """Say whether a frame runs frozen code of Python, or a method that `dataclass` has generated."""
    code = frame.f_code
    if code.co_filename == "<string>" and code.co_varnames:
        return is_dataclass(frame.f_locals.get(code.co_varnames[0]))
    return code.co_filename.startswith("<frozen ")
