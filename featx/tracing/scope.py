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
Handlers = tuple[CallHandler, ReadHandler | None]


_PLAIN_DICTS = (dict, OrderedDict)


class _Switch:
    """Stands in for `module._call_impl`, through which every call of a module goes, hooks included.

    One is made for each module and trace, so it is small: the handlers of a first thread have slots of their own, and
    those of others that trace the model meanwhile a dict.
    """

    __slots__ = ("compiled", "first", "is_removed", "lock", "module", "others", "thread")

    def __init__(self, module: nn.Module, lock: Lock, thread: int, handlers: Handlers) -> None:
        self.module = module
        self.lock = lock
        self.compiled: Any = None
        self.thread = thread
        self.first: Handlers | None = handlers
        self.others: dict[int, Handlers] | None = None
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

    # Filled by `_cover`: a Python-level __init__ would cost as much as all the rest.
    __slots__ = ("original", "switch")

    original: dict[str, Any]
    switch: _Switch

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        handlers = self.switch.handlers()
        on_read = None if handlers is None else handlers[1]
        return value if on_read is None else on_read(self.switch.module, name, value)

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
    modules: Iterable[nn.Module],
    on_call: CallHandler,
    on_read: ReadHandler | None = None,
    *,
    watched: tuple[str, ...] = ("_parameters",),
) -> Generator[None]:
    """Send this thread's calls of `modules`, and reads of their `watched` dicts, to handlers. O(modules)."""
    watched = watched if on_read else ()
    thread = get_ident()
    handlers = (on_call, on_read)
    lock = Lock()
    mine: list[_Switch] = []
    shared: list[tuple[_Switch, Handlers | None]] = []
    try:
        found: list[nn.Module] = []
        with lock:  # whoever finds one of these switches meanwhile waits until all are laid
            for module in modules:
                switch = _Switch(module, lock, thread, handlers)
                # Atomic, so that of two threads that start at once one finds the other's switch.
                if module.__dict__.setdefault("_call_impl", switch) is switch:
                    mine.append(switch)
                    _lay(switch, watched)
                else:
                    found.append(module)
        for module in found:
            shared.append(_join(module, thread, handlers, lock, watched))
        yield
    finally:
        for switch, earlier in shared:
            with switch.lock:
                _leave(switch, thread, earlier)
        with lock:
            for switch in mine:
                _leave(switch, thread, None)


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


def has_own_call(kind: type[nn.Module]) -> bool:
    """Say whether a class of modules does something of its own in `__call__`, around `forward` and hooks."""
    call = kind.__call__
    return call is not nn.Module.__call__ and not call.__module__.startswith("torch.")


def only_passes_on(kind: type[nn.Module]) -> bool:
    """Say whether the `__call__` of a class records nothing ahead of forward: that of the layers of transformers."""
    return kind.__call__.__module__ == "transformers.modeling_layers"


def has_hooks(module: nn.Module) -> bool:
    """Say whether a call of a module runs hooks of its own around `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _join(
    module: nn.Module, thread: int, handlers: Handlers, lock: Lock, watched: tuple[str, ...]
) -> tuple[_Switch, Handlers | None]:
    """Let `handlers` answer in this thread on a module that another trace, or an outer one of this thread, borrows."""
    while True:
        fresh = _Switch(module, lock, thread, handlers)
        switch = module.__dict__.setdefault("_call_impl", fresh)
        with switch.lock:
            if switch.is_removed:
                continue
            if switch is fresh:
                _lay(switch, watched)
                return switch, None
            for name in watched:
                _cover(module.__dict__, name, switch)
            # A trace inside a trace of this thread comes before it.
            return switch, switch.set(thread, handlers)


def _lay(switch: _Switch, watched: tuple[str, ...]) -> None:
    state = switch.module.__dict__
    for name in watched:
        _cover(state, name, switch)
    if state.get("_compiled_call_impl") is not None:
        # A compiled module would run its compiled code; during the trace it runs as written.
        switch.compiled = state["_compiled_call_impl"]
        state["_compiled_call_impl"] = switch


def _cover(state: dict[str, Any], name: str, switch: _Switch) -> None:
    original = state.get(name)
    # A scripted module keeps something else there; it is called whole.
    if original and type(original) in _PLAIN_DICTS:
        covered = state[name] = _WatchedDict(original)
        covered.original = original
        covered.switch = switch


def _leave(switch: _Switch, thread: int, earlier: Handlers | None) -> None:
    if switch.others is not None or switch.thread != thread or earlier is not None:
        switch.set(thread, earlier)
        if switch.thread or switch.others:
            return
    switch.thread = 0
    switch.is_removed = True
    state = switch.module.__dict__
    for name in ("_parameters", "_buffers"):
        covered = state.get(name)
        if type(covered) is _WatchedDict:
            state[name] = covered.restored()
    if switch.compiled is not None:
        state["_compiled_call_impl"] = switch.compiled
    state.pop("_call_impl", None)
