"""Go back to the start of a module that cannot be looked into after all."""

from __future__ import annotations

from typing import Any

from torch import nn

from featx.tracing.calls.torch_calls import TorchCalls
from featx.tracing.recording.recorder import Recorder
from featx.tracing.side_effects.state_checks import StateChecks


class Checkpoint:
    """What has to be undone if a module cannot be looked into after all.

    What is compared with an earlier run by its position (numbers, values that were read) is as if the module had been
    kept whole at once, as it is in the runs that follow.
    """

    def __init__(self, recorder: Recorder, checks: StateChecks, torch_calls: TorchCalls) -> None:
        self._recorder, self._checks = recorder, checks
        self.scope = recorder.scope
        self._compared_alias = recorder.compared_alias
        self._state = checks.states.mark()
        parts = (*recorder.parts, checks, *torch_calls.parts)
        self._marks: list[tuple[Any, Any]] = [(part, part.mark()) for part in parts]
        self._writes, self._written = torch_calls.recent_writes, torch_calls.recent_writes.mark()
        self._called = {} if recorder.called is None else recorder.called
        self._number_of_called = len(self._called)

    def roll_back(self, module: nn.Module) -> None:
        """Take back what was recorded since this was made, and what the module has changed of itself."""
        recorder = self._recorder
        recorder.scope, recorder.compared_alias = self.scope, self._compared_alias
        recorder.opaque_call.leave()
        self._checks.states.reset(module, self._state)
        for part, mark in self._marks:
            part.forget(mark)
        self._writes.forget(self._written)
        while len(self._called) > self._number_of_called:
            self._called.popitem()

    def release(self) -> None:
        """Take note that nothing will be taken back to here; what outer ones need of it is kept."""
        self._writes.release(self._written)
