"""The random generators that the process shares: torch's, Python's and numpy's. Their state is taken and put back.

Other threads may draw from them during a trace. A state that changed tells of this thread only where no other one
has run; otherwise a trace runs again, or uses what else it knows.
"""

from __future__ import annotations

import gc
import random
import sys
from threading import RLock
from types import FrameType
from typing import Any

import torch

from featx.libraries import checks_types
from featx.tracing.environment.other_threads import OtherThreads, is_only_thread
from featx.tracing.signals import ThreadInterference
from featx.tree import tensors_in

# What forward does where a trace cannot follow it.
SETS_GENERATOR = "forward seeds torch's random generator, or puts it back,"
# The methods of a torch.Generator that seed it, and all that put it into another state than the next one.
_SEEDING = {"manual_seed", "seed"}
_SETTERS = {*_SEEDING, "set_state", "graphsafe_set_state", "set_offset"}
_COLLECTOR_SWITCH = RLock()


def rng_state() -> torch.Tensor:
    """Return the state of torch's default generator of the CPU, without a garbage collection meanwhile.

    `torch.get_rng_state` makes the tensor that it returns while it holds the mutex of the generator. Up to Python 3.11
    that may start a collection. Finalizers then run Python code, which gives other threads the GIL. One that asks for
    the state waits for the mutex with the GIL in its hands, and neither thread goes on.
    """
    with _COLLECTOR_SWITCH:  # or another thread could switch it on again in between
        was_enabled = gc.isenabled()
        try:
            gc.disable()
            return torch.get_rng_state()
        finally:
            if was_enabled:
                gc.enable()


class TraceGenerators:
    """Generators from which one trace draws, one for each device, in the state of torch's default ones at the start."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, torch.Generator] = {}

    def start(self) -> None:
        """Take the state of the default generator of the CPU, which a trace puts into another one after that."""
        self._for(torch.device("cpu"))

    def draw(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a kernel that draws from the default generator, and let it draw from one of these."""
        if kwargs.get("generator") is not None:
            return kernel(*args, **kwargs)
        generator = self._for(_device_of(args, kwargs))
        overload = _with_generator(kernel)
        if overload is not None:
            return overload(*args, **{**kwargs, "generator": generator})
        default = _default_generator(generator.device)
        state = default.get_state()
        default.set_state(generator.get_state())
        try:
            return kernel(*args, **kwargs)
        finally:
            generator.set_state(default.get_state())
            default.set_state(state)

    def _for(self, device: torch.device) -> torch.Generator:
        known = self._by_device.get(device)
        if known is None:
            known = self._by_device[device] = torch.Generator(device)
            known.set_state(_default_generator(device).get_state())
        return known


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    # No generator that is left early: Python closes it, and an interrupt at that moment would get lost.
    devices = [leaf.device for leaf in tensors_in(args)]
    device = devices[0] if devices else kwargs.get("device") or torch.device("cpu")
    if device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return torch.device("cpu")  # kernels of the meta device draw nothing


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def _with_generator(kernel: Any) -> Any:
    """Return the overload of a kernel that takes a generator, or None where there is none."""
    if "generator" in [argument.name for argument in kernel._schema.arguments]:
        return kernel
    name = kernel._overloadname
    packet = kernel.overloadpacket
    wanted = "generator" if name == "default" else f"{name}_generator"
    return getattr(packet, wanted) if wanted in packet.overloads() else None


class TorchGenerator:
    """The state of torch's default generator when this is made, and what it should be at the next draw."""

    def __init__(self) -> None:
        self._threads = OtherThreads()
        self._first = self._expected = self._left = rng_state()
        self._seed = torch.initial_seed()
        # Whether `on_call` gets all calls of this thread, and then whether one has set the generator since `note`.
        self.has_profile_hook = False
        self._is_set = self._is_seeded = False

    def on_call(self, frame: FrameType, event: str, called: Any) -> None:
        """Take note of a call with which this thread sets the generator; then other threads may seed it too."""
        if event == "c_call" and called.__name__ in _SETTERS and frame.f_globals is not globals():
            is_default = called.__self__ is torch.default_generator
            self._is_set = self._is_set or is_default
            self._is_seeded = self._is_seeded or (is_default and called.__name__ in _SEEDING)

    def forget(self) -> None:
        """Free the states, 5 KB each, of a trace that is over."""
        self._first = self._expected = self._left = torch.empty(0)

    def note(self) -> None:
        """Take a state that no seed gives as what the next draw should find; the present one beside other threads."""
        is_alone = is_only_thread()
        if is_alone:  # a trace draws nothing from this generator but here, so that the state tells
            with torch._C.DisableTorchFunction():
                torch.empty(1, device="cpu").uniform_()
        self._is_set = self._is_seeded = False
        self._expected = rng_state()
        if is_alone:
            self._left = self._expected

    def was_set(self) -> bool:
        """Say whether this thread has put the generator into another state than the one that `note` found.

        Seeding counts, whatever the state was, where the hook has seen it.

        Raises:
            ThreadInterference: it was seeded, and another thread may have done that.
        """
        if self._is_seeded:  # perhaps as a run before has, whose state could not be put back
            return True
        now = rng_state()
        if torch.equal(now, self._expected):
            return False
        if self.has_profile_hook:
            return self._is_set
        if not self._threads.have_run():
            return True
        if torch.initial_seed() != self._seed:
            raise ThreadInterference("torch's random generator was seeded")
        self._expected = now  # another thread has drawn
        return False

    def restore(self) -> None:
        """Put the generator back, unless another thread may have drawn from it. May be called twice."""
        now = rng_state()
        if torch.equal(now, self._first):
            return
        if torch.equal(now, self._left) or not self._threads.have_run():
            torch.set_rng_state(self._first)


class SharedGenerators:
    """The state of Python's and, where it is loaded, numpy's global generator when this is made. About 10 us."""

    def __init__(self) -> None:
        self._threads = OtherThreads()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def others_may_have_drawn(self) -> bool:
        """Say whether other threads have run since."""
        return self._threads.have_run()

    def have_drawn(self) -> bool:
        """Say whether somebody has drawn from one of them since."""
        if random.getstate() != self._python:
            return True
        # Not where numpy was loaded since.
        return self._numpy is not None and _comparable(_numpy_state()) != _comparable(self._numpy)

    def restore(self) -> None:
        """Put them back where this thread has drawn, and no other may have. May be called twice."""
        if self._threads.have_run():
            return
        if random.getstate() != self._python:
            random.setstate(self._python)
        if self._numpy is not None and _comparable(_numpy_state()) != _comparable(self._numpy):
            sys.modules["numpy.random"].set_state(self._numpy)


class DrawsOfTypeChecks:
    """Puts Python's generator back after each draw of a library that checks types, which no graph has to repeat."""

    def __init__(self) -> None:
        self._state: tuple[Any, ...] | None = None

    def on_call(self, frame: FrameType, event: str, called: Any) -> None:
        """Take note of the state when such a draw begins, and put it back when it is over."""
        if event == "c_call" and called.__name__ == "getrandbits" and checks_types(frame.f_code):
            self._state = random.getstate()
        elif event == "c_return" and self._state is not None:
            random.setstate(self._state)
            self._state = None


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


def _comparable(state: Any) -> Any:
    return (state[0], state[1].tobytes(), *state[2:])
