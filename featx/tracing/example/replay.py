"""Run a second call of a model against the record of the first one, to see whether it does the same.

Nothing is computed and no graph is made: each call of torch, and of a module that is one node, gets what the first one
got, as other objects. Where forward then makes the same calls with the same arguments, it keeps nothing from call to
call that changes what it does. This takes about a tenth of the time of a trace.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Container, Mapping
from typing import Any, cast

import torch
from torch import nn

from featx.ir.equality import is_same
from featx.libraries import mask_maker
from featx.rebuilding import attributes_beside_items, attributes_of
from featx.tracing.environment.autocast_state import AutocastDtypes, autocast_dtypes, toggle_autocast
from featx.tracing.environment.generators import SharedGenerators
from featx.tracing.environment.raised_errors import free_frames
from featx.tracing.environment.restorers import run_restorers
from featx.tracing.environment.thread_modes import FunctionMode, ThreadModes
from featx.tracing.guards.scalars import TracedNumber, plain_number
from featx.tracing.history.call_record import Record
from featx.tracing.inputs.model_call import as_given, call_model
from featx.tracing.objects.arrays import is_array
from featx.tracing.objects.followed_tuple import plain_tuple
from featx.tracing.objects.plain_objects import is_plain_object
from featx.tracing.objects.structure import copy_structure
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.interception import intercept
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.replica.replica import Replica
from featx.tracing.signals import Diverged
from featx.tree import rebuild_sequence, tensors_in


def does_the_same_again(
    replay: Replay, context: ModelContext, replica: Replica, recorder: Recorder,
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, toggles_autocast: bool,
) -> bool:  # fmt: skip
    """Call forward a second time, with the inputs of the first one, and say whether it does the same.

    Args:
        replay: answers what it calls.
        context: what is traced.
        replica: the copy of it that has run once.
        recorder: knows which tensors the first call has made.
        args: the example.
        kwargs: the example, by name.
        toggles_autocast: whether autocast does something else around this call, to see whether that matters.
    """
    modes = ThreadModes()

    def on_module(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return replay.on_module(replica.paths.get(module), forward, args, kwargs)

    def call() -> Any:
        with torch._C.DisableTorchFunction():
            call_args, call_kwargs = replay.inputs(context.signature, args, kwargs)
        return call_model(context, replica.root, recorder.raised, call_args, call_kwargs)

    def restore_caches() -> None:
        context.caches.restore(lambda each: replay.has_made(each) or recorder.is_made_here(each))

    generators = SharedGenerators()
    restorers: list[Callable[[], object]] = [
        generators.restore, restore_caches, context.passing.uninstall, modes.leave,
    ]  # fmt: skip
    try:
        try:
            context.caches.put_left()
            context.caches.keep_iterators()
            intercept(replica.paths, on_module)
            context.passing.install(_refuse_draw, replay.on_wrapped, recorder.numbers.names_to_follow())
            modes.leave_inference_mode()
            modes.enter(replay.mode, None, gradients=replay.gradients)
            if toggles_autocast:
                toggle_autocast()
            return replay.does_the_same(call) and context.passing.are_installed()
        except KeyboardInterrupt as error:
            free_frames(error)
            raise
        finally:
            run_restorers(restorers)
    finally:
        run_restorers(restorers)  # again: an interrupt may have ended the first one


def _refuse_draw(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise Diverged


class Replay:
    """Answers what forward calls in a second call on a replica, whose first one has left `record`.

    Args:
        record: what the first call did.
        owned: the ids of the tensors of the model, which are the same in both calls.
        one_object: tensors of the first call that are in this one the same object as another, by their ids.
        gradients: whether gradients are enabled around this call.

    Where autocast does something else around this call than around the first one, forward must not depend on it, and
    may set it only in a way that the first call has shown. So it is with gradients that are enabled around one of the
    two alone.
    """

    def __init__(
        self, record: Record, owned: Container[int], one_object: Mapping[int, torch.Tensor], *, gradients: bool
    ) -> None:
        self._record = record
        self._owned = owned
        self.gradients = gradients
        self._one_object = one_object
        self._position = 0
        self._casts: AutocastDtypes = ()
        # What stands in this call for the tensors of the first one, by the ids of those.
        self._twins: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()
        # The objects that are being compared, by the ids of those of the first call.
        self._compared: dict[int, Any] = {}
        self.mode = FunctionMode(self.answer)

    def end(self) -> list[weakref.ref[torch.Tensor]]:
        """Let go of the tensors of this call, which is over, and return them: some may live on elsewhere."""
        twins, self._twins = list(map(weakref.ref, self._twins.values())), {}
        self._record, self._made, self._one_object = Record(), set(), {}
        return twins

    def inputs(self, signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what to call forward with: the example, with other tensors."""
        recorded = iter(self._record.inputs)
        bound = signature.bind(*args, **kwargs)

        def twin(leaf: Any, path: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self._twin_of(next(recorded))
            return leaf.copy() if is_array(leaf) else leaf

        for name, value in bound.arguments.items():
            bound.arguments[name] = copy_structure(value, twin)
        return as_given(bound, len(args))

    def does_the_same(self, call: Callable[[], Any]) -> bool:
        """Run `call`; say whether it makes the calls of the first one, all of them, and returns the same."""
        record = self._record
        self._casts = autocast_dtypes()
        try:
            result = call()
        except (Diverged, Exception):
            return record.stopped_early and self._position == len(record.events)
        with torch._C.DisableTorchFunction():
            is_whole = not record.stopped_early and self._position == len(record.events)
            return is_whole and self._is_same(record.result, result)

    # -- what forward does -------------------------------------------------------------------------------------------

    def _is_next(self, called: Any) -> bool:
        events = self._record.events
        return self._position < len(events) and events[self._position].called == called

    def answer(self, called: Any, args: Any, kwargs: Any) -> Any:
        """Return what the first call got here.

        Raises:
            Diverged: it called something else here, or with other arguments, or has broken off by now.
        """
        with torch._C.DisableTorchFunction():
            if not self._is_next(called):
                raise Diverged
            event = self._record.events[self._position]
            switches_gradients = called is torch._C._set_grad_enabled
            are_same = self._is_same_switch if switches_gradients else self._is_same
            if not are_same(event.args, args) or ((event.kwargs or kwargs) and not self._is_same(event.kwargs, kwargs)):
                raise Diverged
            if not self._has_expected_autocast(event.autocast_dtypes):
                raise Diverged
            self._position += 1
            return called(*args) if switches_gradients else self._twin_of(event.result)

    def _is_same_switch(self, recorded: tuple[bool], given: tuple[bool]) -> bool:
        """Say whether forward sets the gradient mode as in the first call, or back to what it is around the call."""
        around = self._record.gradients
        return recorded == given or (recorded == (around,) and given == (self.gradients,))

    def _has_expected_autocast(self, recorded: AutocastDtypes) -> bool:
        """Say whether the regions that are open are those that were seen to be open in the first call."""
        return all(
            now == (around if before == around_before else before)
            for before, around_before, now, around in zip(
                recorded, self._record.autocast_dtypes, autocast_dtypes(), self._casts, strict=True
            )
        )

    def on_module(
        self, path: str | None, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of the module at `path`: what the first call got where it was one node there."""
        if path is None:
            raise Diverged
        return self.answer(path, args, kwargs) if self._is_next(path) else forward(*args, **kwargs)

    def on_wrapped(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a function that the trace observes."""
        if isinstance(function, functools._lru_cache_wrapper):
            return function.__wrapped__(*args, **kwargs)
        if self._is_next(function):
            return self.answer(function, args, kwargs)
        return (mask_maker(function) or function)(*args, **kwargs)

    # -- values ------------------------------------------------------------------------------------------------------

    def has_made(self, value: Any) -> bool:
        """Say whether a value is a tensor of this call."""
        return id(value) in self._made

    def _twin_of(self, value: Any) -> Any:
        """Return what stands for a value of the first call: other tensors, in other containers."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        value = plain_tuple(value)
        kind = type(value)
        if kind is list:
            return [self._twin_of(item) for item in cast(list[Any], value)]
        if kind is dict:
            return {key: self._twin_of(item) for key, item in cast(dict[Any, Any], value).items()}
        if isinstance(value, tuple) and tensors_in(value):
            items = [self._twin_of(item) for item in cast(tuple[Any, ...], value)]
            return rebuild_sequence(value, items)
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._twins.get(id(tensor))
        if known is None:
            if id(tensor) in self._owned:
                return tensor
            if id(tensor) in self._one_object:
                known = self._twins[id(tensor)] = self._tensor(self._one_object[id(tensor)])
                return known
            if type(tensor) is not torch.Tensor:
                raise Diverged
            known = self._twins[id(tensor)] = tensor.detach()
            self._made.add(id(known))
        return known

    def _is_same(self, recorded: Any, given: Any) -> bool:
        if isinstance(recorded, torch.Tensor):
            return given is self._twins.get(id(recorded), recorded)
        kind = type(recorded)
        if issubclass(kind, TracedNumber) or isinstance(given, TracedNumber):
            one, other = plain_number(recorded), plain_number(given)
            return type(one) is type(other) and is_same(one, other)
        if kind is not type(given):
            return False
        if isinstance(recorded, (tuple, list)):
            is_same_beside = self._is_same_object(recorded, given, attributes_beside_items)
            return is_same_beside and len(recorded) == len(given) and all(map(self._is_same, recorded, given))
        if isinstance(recorded, dict):
            if list(recorded) != list(given) or not self._is_same_object(recorded, given, attributes_beside_items):
                return False
            return all(map(self._is_same, recorded.values(), given.values()))
        if kind is slice:
            return all(self._is_same(getattr(recorded, part), getattr(given, part)) for part in _PARTS)
        if recorded is given:
            return True
        if kind is weakref.ref:
            return self._is_same(recorded(), given())
        if is_plain_object(recorded):
            return self._is_same_object(recorded, given, attributes_of)
        try:
            return is_same(recorded, given)
        except Exception:  # of a comparison of tensors, for example: not known
            return False

    def _is_same_object(self, recorded: Any, given: Any, attributes: Callable[[Any], dict[str, Any]]) -> bool:
        before, now = attributes(recorded), attributes(given)
        if not before and not now:
            return True
        if id(recorded) in self._compared:  # it holds itself
            return self._compared[id(recorded)] is given
        self._compared[id(recorded)] = given
        try:
            return self._is_same(before, now)
        finally:
            del self._compared[id(recorded)]


_PARTS = ("start", "stop", "step")
