"""A second call of the model, compared with the record of the first one. Nothing is computed, and no graph is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from featx.tracing.environment.autocast_state import toggle_autocast
from featx.tracing.environment.raised_errors import free_frames
from featx.tracing.environment.thread_modes import ThreadModes
from featx.tracing.example.replay import Replay
from featx.tracing.history.call_record import Record
from featx.tracing.inputs.model_call import call_model
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.interception import intercept
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.replica.replica import Replica
from featx.tracing.signals import Diverged


class SecondCall:
    """A second call on the replica of a run, in the same conditions.

    Args:
        context: what is traced.
        replica: the copy of it that has run once.
        recorder: knows which tensors the first call has made.
        record: what the first call did.
        gradients: whether gradients are enabled.
        observes_autocast: whether the first call has recorded what forward does with autocast. Otherwise autocast does
            something else around the second call, to see whether that matters.
        one_object: as for `Replay`.
    """

    def __init__(
        self, context: ModelContext, replica: Replica, recorder: Recorder, record: Record, *,
        gradients: bool, observes_autocast: bool, one_object: Mapping[int, torch.Tensor],
    ) -> None:  # fmt: skip
        self._context = context
        self._replica = replica
        self._recorder = recorder
        self._gradients = gradients
        self._observes_autocast = observes_autocast
        self._replay = Replay(record, recorder.owned, one_object)
        self._restorers: list[Callable[[], None]] = []

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Call forward, and say whether it does the same as in the first call."""
        try:
            try:
                return self._call_again(args, kwargs)
            except KeyboardInterrupt as error:
                free_frames(error)
                raise
            finally:
                self._restore()
        finally:
            self._restore()  # again: an interrupt may have ended the first one

    def end(self) -> list[weakref.ref[torch.Tensor]]:
        """Drop the record, and return the tensors of this call: some may live on elsewhere."""
        return self._replay.end()

    def _call_again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        context, replay = self._context, self._replay
        modes = ThreadModes()
        self._restorers = [self._restore_caches, context.passing.uninstall, modes.leave]
        context.caches.put_left()
        intercept(self._replica.paths, self._on_module)
        context.passing.install(_refuse_draw, replay.on_wrapped, self._recorder.numbers.names_to_follow())
        modes.leave_inference_mode()
        modes.enter(replay.mode, None, gradients=self._gradients)
        if not self._observes_autocast:
            toggle_autocast()

        def call() -> Any:
            with torch._C.DisableTorchFunction():
                call_args, call_kwargs = replay.inputs(context.signature, args, kwargs)
            return call_model(context, self._replica.root, self._recorder.raised, call_args, call_kwargs)

        return replay.does_the_same(call) and context.passing.are_installed()

    def _on_module(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._replay.on_module(self._replica.paths.get(module), forward, args, kwargs)

    def _restore_caches(self) -> None:
        self._context.caches.restore(lambda each: self._replay.has_made(each) or self._recorder.is_made_here(each))

    def _restore(self) -> None:
        for restore in reversed(self._restorers):
            restore()
        self._restorers = []


def _refuse_draw(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise Diverged
