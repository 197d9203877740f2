"""Record whether code of the model reads `training`. If none does, one trace serves both modes."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, cast

from torch import nn

from featx.libraries import LAYERS
from featx.tracing.replica.replica import only_sets_flags
from featx.tracing.source_uses.mode_uses import chooses_dropout


class OneNodeCalls(Protocol):
    """What knows whether a call that is one node runs now."""

    @property
    def is_inside(self) -> bool:
        """Whether one runs."""
        ...


class ModeReads:
    """Whether the mode of a module was asked for, or set, in the traces that observe it.

    Attributes:
        any: it was.
        decides: it was for something else than the arguments of dropout.
    """

    def __init__(self) -> None:
        self.any = self.decides = False
        self._of_run: weakref.ref[OneNodeCalls] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModeReads:
        return self  # a copy of a module that is asked answers for the model

    def __reduce__(self) -> tuple[Any, ...]:
        return ModeReads, ()  # what is unpickled is asked outside of the trace

    def observe_run(self, calls: OneNodeCalls) -> None:
        """Ask `calls` from now on whether a call that is one node runs. It is not kept alive."""
        self._of_run = weakref.ref(calls)

    def _is_inside_node(self) -> bool:
        calls = None if self._of_run is None else self._of_run()
        return calls is not None and calls.is_inside

    def on_read(self, module: nn.Module | None) -> None:
        """Take note of a read, unless a layer of torch that is one node asks for its own mode, as it will again."""
        frame = sys._getframe(3)
        reader = frame.f_globals.get("__name__", "")
        is_own = type(module).__module__.startswith(LAYERS) and reader.startswith(LAYERS)
        if not (reader.startswith("featx.") or (is_own and self._is_inside_node())):
            self.any = True
            self.decides = self.decides or not chooses_dropout(frame)

    def on_unknown(self) -> None:
        """Take note that a mode was set, or may have been asked for."""
        self.any = self.decides = True


class _Submodules(dict[str, Any]):
    """A module's dict of submodules, in which `nn.Module` finds the mode where the attribute itself is missing."""

    __slots__ = ("owner", "reads", "training")

    owner: nn.Module | None
    reads: ModeReads
    training: bool

    def __contains__(self, name: object) -> bool:
        # `nn.Module.__setattr__` asks too, and must not take a mode for a submodule.
        if name == "training" and sys._getframe(1).f_code is nn.Module.__getattr__.__code__:
            self.reads.on_read(self.owner)
            return True
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name != "training":
            raise KeyError(name)
        return self.training

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a module that forward makes knows its mode too.
        return _answering, (dict(self.items()), self.training, self.reads)


def _answering(submodules: dict[str, Any], training: bool, reads: ModeReads) -> _Submodules:
    answering = _Submodules(submodules)
    answering.training, answering.reads, answering.owner = training, reads, None
    return answering


def mode_of(module: nn.Module) -> bool:
    """Return the mode of a module; this is not counted as a read. O(1)."""
    submodules = module._modules
    if type(submodules) is _Submodules and "training" not in module.__dict__:
        return submodules.training
    return module.training


def record_mode_reads(modules: Iterable[nn.Module], reads: ModeReads) -> None:
    """Let `reads` record every read of `training` in the modules of a replica. O(modules).

    The attribute is taken away, and answered from where submodules are looked up. Code that looks for it in
    `vars(module)` fails. Where some module cannot be observed, `reads` says that one was read.
    """
    modules = list(modules)
    if not all(map(_supports_recording, modules)):
        reads.on_unknown()
        return
    for module in modules:
        state = module.__dict__
        if type(state["_modules"]) is _Submodules:  # in the next call of one replica
            state["_modules"].reads = reads
            continue
        state["_modules"] = _answering(state["_modules"], state.pop("training"), reads)
        state["_modules"].owner = module


def set_mode(module: nn.Module, training: bool) -> None:
    """Set the mode of a module that is observed; this is not counted as a read. O(1)."""
    cast(_Submodules, module._modules).training = training


def has_set_mode(module: nn.Module) -> bool:
    """Say whether the mode of a module that was observed has been set."""
    return type(module._modules) is _Submodules and "training" in module.__dict__


def _supports_recording(module: nn.Module) -> bool:
    """Say whether the mode of a module is nothing but an attribute."""
    return (
        ("training" in module.__dict__ or type(module._modules) is _Submodules)
        and type(module._modules) in (dict, _Submodules)
        and type(module).__getattribute__ is object.__getattribute__
        and only_sets_flags(module)
    )
