"""What a run observes of calls that torch does not report: autocast, random generators, work for other threads."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

from featx.tracing.calls.torch_calls import TorchCalls
from featx.tracing.environment.generators import DrawsOfTypeChecks
from featx.tracing.environment.other_threads import AllThreads
from featx.tracing.environment.profile_hook import ProfileCallback, ProfileHook, delegates_work
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.signals import PossibleThreadInterference
from featx.tracing.source.frames import is_library_code

if TYPE_CHECKING:
    from featx.tracing.example.tracer import ExampleTracer


class Observers:
    """The observers of one run.

    Args:
        recorder: records the state of autocast.
        torch_calls: is notified of torch's generator, and of work that is given to other threads.
        tracer: says what is to be observed.
        context: what is traced.
    """

    def __init__(
        self, recorder: Recorder, torch_calls: TorchCalls, tracer: ExampleTracer, context: ModelContext
    ) -> None:
        self._recorder = recorder
        self._torch_calls = torch_calls
        self._tracer = tracer
        self._context = context
        # Whether to note what code runs.
        self._notes_code = context.checks_plain_values
        self._is_hooked = False
        # Tells whether other threads ran, where their results would have values and so not be noticed.
        self._others: AllThreads | None = None

    def hook(self, *, has_values: bool) -> ProfileHook:
        """Return the profiling hook of this run, not started. `has_values`: whether some of its tensors have values."""
        callbacks: list[ProfileCallback] = (
            [self._torch_calls.generator.on_call] if self._tracer.uses_profile_hook else []
        )
        if self._tracer.observes_autocast:
            callbacks.append(self._on_autocast)
        if self._notes_code:
            callbacks.append(self._on_code)
        if self._context.puts_back_draws:
            callbacks.append(DrawsOfTypeChecks().on_call)
        # On stand-ins alone, what another thread computes has no values, and is seen where forward uses it. Where some
        # inputs have values, it is cheaper to ask afterwards whether another thread has run.
        is_likely = self._tracer.uses_profile_hook or self._context.uses_threading
        if self._recorder.is_real or (has_values and is_likely):
            callbacks.append(self._on_handover)
        elif has_values:
            self._others = AllThreads()
        return ProfileHook(callbacks)

    def start(self, hook: ProfileHook) -> None:
        """Start the hook. Where a profiler has it already, the run goes on without."""
        self._is_hooked = hook.start()
        self._recorder.called = {} if self._is_hooked and self._notes_code else None
        self._torch_calls.generator.has_profile_hook = self._is_hooked and self._tracer.uses_profile_hook

    def record_autocast(self) -> None:
        """Record the state of autocast at the start, where it was to be observed and cannot be."""
        if self._tracer.observes_autocast and not self._is_hooked:
            self._recorder.autocast_modes.record_state()

    def check_threads(self) -> None:
        """Raise if another thread may have computed something for forward.

        Raises:
            PossibleThreadInterference: another thread has run.
        """
        if self._others is not None and self._others.have_run():
            raise PossibleThreadInterference("another thread has run, and forward may have given work to it")

    def _on_code(self, frame: FrameType, event: str, called: Any) -> None:
        called = self._recorder.called
        if event != "call" or called is None or self._is_inside_of_call() or is_library_code(frame.f_code):
            return
        called.setdefault(frame.f_code, frame.f_globals)

    def _on_handover(self, frame: FrameType, event: str, called: Any) -> None:
        if not self._is_inside_of_call() and delegates_work(frame, event, called):
            self._torch_calls.refuse_other_threads()

    def _on_autocast(self, frame: FrameType, event: str, called: Any) -> None:
        if not self._is_inside_of_call():
            self._recorder.autocast_modes.on_call(frame, event, called)

    def _is_inside_of_call(self) -> bool:
        # What recorded calls do inside, such as torch.cond, belongs to them.
        return self._recorder.opaque_call.is_inside or self._torch_calls.kernels.depth > 0
