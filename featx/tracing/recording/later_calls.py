"""Which requested modules the code of forward may still call, after a decision or where a trace breaks off."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from featx.ir.paths import module_at
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.source.frames import is_library_code, is_of_featx
from featx.tracing.source_uses.later_names import KnownLaterNames, LaterNames


class LaterCalls:
    """Finds modules of which a value is requested, and which may be called again.

    The path of a module means what its last call returned, and which one that is may follow from a decision of Python.
    The path of a layer means its first call.

    Args:
        root: what runs.
        paths: the modules in it, with their paths.
        names: what is known of the code, from earlier runs too.

    Attributes:
        requested: the names that are requested.
    """

    def __init__(self, root: object, paths: Mapping[nn.Module, str], names: KnownLaterNames) -> None:
        self.requested: frozenset[str] = frozenset()
        self._root = root
        self._names = names
        self._paths = paths
        # By the path of the module, and the code and place of each frame.
        self._known: dict[Any, frozenset[str]] = {}
        self._requested: dict[str, dict[str, nn.Module]] = {}

    def after_decision(self, frame: FrameType, path: str) -> frozenset[str]:
        """Return those that code may call after the decision that `frame` makes, in the module at `path`."""
        if not self._requested_inside(path):
            return frozenset()
        frames: list[FrameType] = []
        caller: FrameType | None = frame
        while caller is not None and not is_of_featx(caller.f_code):
            frames.append(caller)
            caller = caller.f_back
        places = path, *((each.f_code, each.f_lasti) for each in frames)
        if places not in self._known:
            self._known[places] = self._of_frames(frames, path, is_decided=True)
        return self._known[places]

    def after_error(self, traceback: TracebackType | None) -> frozenset[str]:
        """Return those that code may call, or not, after the place where an error has ended forward."""
        found: frozenset[str] = frozenset()
        path, frames = "", list[FrameType]()
        while traceback is not None:
            frame = traceback.tb_frame
            module = next(iter(frame.f_locals.values()), None) if not is_library_code(frame.f_code) else None
            inner = self._paths.get(module, path) if isinstance(module, nn.Module) else path
            if inner != path:
                found |= self._of_frames(frames, path, is_decided=False)
                path, frames = inner, []
            frames.append(frame)
            traceback = traceback.tb_next
        return found | self._of_frames(frames, path, is_decided=False)

    def _requested_inside(self, path: str) -> dict[str, nn.Module]:
        """Return the requested modules inside of the one at `path` that are no layers."""
        if path not in self._requested:
            inside = f"{path}." if path else ""
            names = (each for each in self.requested if each.startswith(inside) and each != path)
            found = {each: module_at(self._root, each) for each in names}
            self._requested[path] = {
                each: module
                for each, module in found.items()
                if module is not None and (not is_torch_layer(type(module)) or module._modules)
            }
        return self._requested[path]

    def _of_frames(self, frames: list[FrameType], path: str, *, is_decided: bool) -> frozenset[str]:
        requested = self._requested_inside(path)
        if not requested:
            return frozenset()
        names, kind = LaterNames(), type(module_at(self._root, path))
        for frame in frames:
            if not is_library_code(frame.f_code):
                names.add(self._names.of(frame, kind))
        if not (is_decided or names.decides):  # one run tells what the others do
            return frozenset()
        return frozenset(each for each, module in requested.items() if _may_call(names, each, module, path))


def _may_call(names: LaterNames, requested: str, module: nn.Module, path: str) -> bool:
    first = requested.removeprefix(f"{path}." if path else "").partition(".")[0]
    # The path of one that is not called itself means the last module that is called in it.
    kind = type(module)
    is_container = isinstance(module, nn.Sequential) or hasattr(kind, "__iter__") or kind.forward is nn.Module.forward
    return names.may_call(first, is_container=is_container)
