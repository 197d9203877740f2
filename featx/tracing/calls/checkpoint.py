"""Go back to the start of a module that cannot be looked into after all."""

from __future__ import annotations

from torch import nn

from featx.tracing.recording.recorder import Recorder
from featx.tracing.side_effects.state_checks import StateChecks


class Checkpoint:
    """What has to be undone if a module cannot be looked into after all."""

    def __init__(self, recorder: Recorder, checks: StateChecks) -> None:
        self._recorder, self._checks = recorder, checks
        self.scope = recorder.scope
        self._nodes = recorder.graph.mark()
        self._names, self._lineage = recorder.names.mark(), recorder.lineage.mark()
        self._writes = recorder.write_log.mark()
        self._states, self._autocast = checks.states.mark(), recorder.autocast_modes.mark()
        self._events = [] if recorder.call_record is None else recorder.call_record.events
        self._number_of_events = len(self._events)
        self._called = {} if recorder.called is None else recorder.called
        self._number_of_called = len(self._called)

    def roll_back(self, module: nn.Module) -> None:
        """Take back what was recorded since this was made, and what the module has changed of itself."""
        recorder = self._recorder
        recorder.scope = self.scope
        recorder.opaque_call.leave()
        recorder.names.forget(self._names)
        recorder.lineage.forget(self._lineage)
        recorder.write_log.forget(self._writes)
        del self._events[self._number_of_events :]
        while len(self._called) > self._number_of_called:
            self._called.popitem()
        self._checks.states.reset(module, self._states)
        recorder.autocast_modes.forget(self._autocast)
        recorder.graph.forget(self._nodes)
