"""Hear whether the code of a model asks in which mode it is: what does not ask does the same in both."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from featx.tracing.modes import only_sets_flags
from featx.tracing.scope import walk_modules

_OF_TORCH = ("torch.nn.modules.", "torchvision.ops.")


class ModeReads:
    """Whether the mode of a module was asked for, or set. `any` is final when the context is left."""

    def __init__(self) -> None:
        self.any = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ModeReads:
        return self  # a copy of a module that is asked answers for the model

    def on_read(self, module: nn.Module | None) -> None:
        """Take note of a read, unless a layer of torch asks for its own mode, on which no node depends but its own."""
        reader = sys._getframe(3).f_globals.get("__name__", "")
        is_own = type(module).__module__.startswith(_OF_TORCH)
        self.any = self.any or not (reader.startswith("featx.") or (is_own and reader.startswith(_OF_TORCH)))


class _Submodules(dict[str, Any]):
    """A module's dict of submodules, in which `nn.Module` finds the mode where the attribute itself is missing."""

    __slots__ = ("original", "owner", "reads", "training")

    original: dict[str, Any]
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
        # A copy of the model that somebody makes meanwhile knows its mode too.
        return _answering, (dict(self.items()), self.training, self.reads)


def _answering(submodules: dict[str, Any], training: bool, reads: ModeReads) -> _Submodules:
    answering = _Submodules(submodules)
    answering.original, answering.training, answering.reads = submodules, training, reads
    answering.owner = None
    return answering


def mode_of(module: nn.Module) -> bool:
    """Return the mode of a module without being heard. O(1), also while others are listened to."""
    submodules = module._modules
    if type(submodules) is _Submodules and "training" not in module.__dict__:
        return submodules.training
    return module.training


@contextmanager
def mode_reads(model: nn.Module) -> Generator[ModeReads]:
    """Hear of every read of `training` in a model; it is as before afterwards. O(modules).

    The attribute is taken away from each module meanwhile, and answered from where submodules are looked up, in all
    threads. Code that looks for it in `vars(module)` fails.
    """
    reads = ModeReads()
    modules = [module for _, module in walk_modules(model)]
    if not all(map(_can_be_heard, modules)):
        reads.any = True
        yield reads
        return
    laid: list[_Submodules] = []
    try:
        for module in modules:
            laid.append(_lay(module, reads))
        yield reads
    finally:
        for submodules, module in zip(laid, modules, strict=False):
            reads.any = _take_away(submodules, module) or reads.any


def _can_be_heard(module: nn.Module) -> bool:
    """Say whether the mode of a module is nothing but an attribute, and the first one, so that its place is known."""
    return (
        next(iter(module.__dict__), None) == "training"
        and type(module._modules) is dict
        and type(module).__getattribute__ is object.__getattribute__
        and only_sets_flags(module)
    )


def _lay(module: nn.Module, reads: ModeReads) -> _Submodules:
    state = module.__dict__
    submodules = _answering(state["_modules"], state["training"], reads)
    submodules.owner = module
    state["_modules"] = submodules  # ahead of the deletion: other threads find the mode in the one or the other
    del state["training"]
    return submodules


def _take_away(submodules: _Submodules, module: nn.Module) -> bool:
    """Put a module's attributes back, in their order, and say whether somebody has set its mode meanwhile."""
    original = submodules.original
    if submodules != original:
        original.clear()
        original.update(submodules)
    state = module.__dict__
    is_set = "training" in state
    # One assignment, so that another thread that runs the model finds the mode at any time.
    module.__dict__ = {"training": submodules.training, **state, "_modules": original}
    return is_set
