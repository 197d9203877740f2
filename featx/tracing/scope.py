"""Borrow a model for the time of a trace: intercept its calls and parameter reads in one thread, put all back after.

Nothing is patched that another model uses. A pass-through is laid into the `__dict__` of each module instance (for
calls) and over its dict of parameters (for reads). It acts in the threads that trace and passes every other thread
through, and it goes when the last trace is done, also after an error.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from types import MethodType
from typing import Any

from torch import nn

CallHandler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
ReadHandler = Callable[[nn.Module, str, Any], Any]
Handlers = tuple[CallHandler, ReadHandler]


class _Switch:
    """Stands in for `module._call_impl`, through which every call of a module goes, hooks included.

    One is made for each module and trace, so it is small: the handlers of a first thread have slots of their own, and
    those of others that trace the model meanwhile a dict.
    """

    __slots__ = ("compiled", "first", "is_laid", "is_removed", "lock", "module", "others", "thread")

    def __init__(self, module: nn.Module, lock: Lock) -> None:
        self.module = module
        self.lock = lock
        self.compiled: Any = None
        self.thread = 0
        self.first: Handlers | None = None
        self.others: dict[int, Handlers] | None = None
        self.is_laid = False
        self.is_removed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handlers = self.handlers()
        module = self.module
        if handlers is None:
            return type(module)._call_impl(module, *args, **kwargs)
        return handlers[0](module, MethodType(type(module)._call_impl, module), args, kwargs)

    def handlers(self) -> Handlers | None:
        """Return the handlers of the running thread, if it traces."""
        thread = get_ident()
        if thread == self.thread:
            return self.first
        return self.others.get(thread) if self.others else None

    def set(self, thread: int, handlers: Handlers | None) -> Handlers | None:
        """Let `handlers` answer in `thread`, or nobody, and return those that did until now."""
        others = self.others or {}
        if self.thread in (0, thread) and thread not in others:
            earlier, self.first = self.first, handlers
            self.thread = thread if handlers else 0
            return earlier
        self.others = {other: known for other, known in others.items() if other != thread}
        if handlers:
            self.others[thread] = handlers
        return others.get(thread)

    # A copy of the model that somebody makes during the trace is an ordinary model.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self.module)._call_impl, memo[id(self.module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "_call_impl")


class _WatchedDict(dict[str, Any]):
    """A module's dict of parameters or buffers that tells the tracing thread's handler of each read."""

    __slots__ = ("_switch", "original")

    def __init__(self, original: dict[str, Any], switch: _Switch) -> None:
        super().__init__(original)
        self.original = original
        self._switch = switch

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        handlers = self._switch.handlers()
        return value if handlers is None else handlers[1](self._switch.module, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)

    def restored(self) -> dict[str, Any]:
        """Return the dict that this one covered, with the changes that were made meanwhile."""
        original = self.original
        if self.keys() != original.keys() or any(value is not original.get(name) for name, value in self.items()):
            original.clear()
            original.update(self.items())
        return original


@contextmanager
def borrowed(
    modules: Iterable[nn.Module], on_call: CallHandler, on_read: ReadHandler, *, watch_buffers: bool = False
) -> Generator[None]:
    """Send this thread's calls of `modules`, and reads of their parameters, to handlers. O(modules)."""
    thread = get_ident()
    handlers = (on_call, on_read)
    lock = Lock()
    switches: list[tuple[_Switch, Handlers | None]] = []
    try:
        for module in modules:
            switches.append(_enter(module, thread, handlers, lock, watch_buffers))
        yield
    finally:
        for switch, earlier in switches:
            _leave(switch, thread, earlier)


def walk_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of `root` and everything in it, each once, in the order of `named_modules`."""
    seen: set[nn.Module] = set()
    pending = [("", root)]
    while pending:
        path, module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        if module._modules:
            prefix = f"{path}." if path else ""
            pending += [
                (prefix + name, child) for name, child in reversed(module._modules.items()) if child is not None
            ]


def _enter(
    module: nn.Module, thread: int, handlers: Handlers, lock: Lock, watch_buffers: bool
) -> tuple[_Switch, Handlers | None]:
    state = module.__dict__
    while True:
        # Atomic, so that of two threads that start at once one finds the other's switch.
        switch = state.setdefault("_call_impl", _Switch(module, lock))
        with switch.lock:
            if switch.is_removed:
                continue
            # A trace inside a trace of this thread comes before it.
            earlier = switch.set(thread, handlers)
            if not switch.is_laid:
                switch.is_laid = True
                _cover(state, "_parameters", switch)
                if state.get("_compiled_call_impl") is not None:
                    # A compiled module would run its compiled code; during the trace it runs as written.
                    switch.compiled = state["_compiled_call_impl"]
                    state["_compiled_call_impl"] = switch
            if watch_buffers:
                _cover(state, "_buffers", switch)
            return switch, earlier


def _cover(state: dict[str, Any], name: str, switch: _Switch) -> None:
    # A scripted module keeps something else there; it is called whole.
    if type(state.get(name)) in (dict, OrderedDict) and state[name]:
        state[name] = _WatchedDict(state[name], switch)


def _leave(switch: _Switch, thread: int, earlier: Handlers | None) -> None:
    with switch.lock:
        switch.set(thread, earlier)
        if switch.thread or switch.others:
            return
        switch.is_removed = True
        state = switch.module.__dict__
        for name in ("_parameters", "_buffers"):
            covered = state.get(name)
            if type(covered) is _WatchedDict:
                state[name] = covered.restored()
        if switch.compiled is not None:
            state["_compiled_call_impl"] = switch.compiled
        state.pop("_call_impl", None)
