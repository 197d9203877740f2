"""Send calls of a replica's modules, and reads of their parameters, to handlers; say what else runs in a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

from torch import nn

from featx.ir.torch_layers import is_of_torch

ModuleCallHandler = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
ParameterReadHandler = Callable[[nn.Module, str, Any], Any]


class _Interceptor:
    """Takes the place of `module._call_impl`, through which every call of a module goes, hooks included."""

    __slots__ = ("module", "on_call")

    def __init__(self, module: nn.Module, on_call: ModuleCallHandler) -> None:
        self.module = module
        self.on_call = on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        return self.on_call(module, MethodType(type(module)._call_impl, module), args, kwargs)

    # A copy of a module that forward makes is an ordinary module.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self.module)._call_impl, memo[id(self.module)])

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "_call_impl")


class _WatchedDict(dict[str, Any]):
    """A module's dict of parameters or buffers that hands each value that is read to a handler."""

    # Filled by `intercept`: a Python-level __init__ would cost as much as all the rest.
    __slots__ = ("module", "on_read")

    module: nn.Module
    on_read: ParameterReadHandler

    def __getitem__(self, name: str) -> Any:
        return self.on_read(self.module, name, super().__getitem__(name))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def intercept(
    modules: Iterable[nn.Module],
    on_call: ModuleCallHandler,
    on_read: ParameterReadHandler | None = None,
    *,
    watched: tuple[str, ...] = ("_parameters",),
) -> None:
    """Send calls of `modules`, and reads of their `watched` dicts, to handlers, for as long as they live. O(modules).

    The modules are those of a replica: nothing else refers to them, and nothing is put back.
    """
    for module in modules:
        state = module.__dict__
        state["_call_impl"] = _Interceptor(module, on_call)
        if on_read is None:
            continue
        for name in watched:
            original = state.get(name)
            if original and type(original) is dict:  # a scripted module has something else there
                covered = state[name] = _WatchedDict(original)
                covered.module, covered.on_read = module, on_read


def has_own_call(kind: type[nn.Module]) -> bool:
    """Say whether a class of modules does something of its own in `__call__`, around `forward` and hooks."""
    call = kind.__call__
    return call is not nn.Module.__call__ and not is_of_torch(call)


def has_backward_hooks(module: nn.Module) -> bool:
    """Say whether a module has hooks for the gradients of its inputs or outputs."""
    return bool(module._backward_hooks or module._backward_pre_hooks)
