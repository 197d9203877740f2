"""A text that tells values apart by what they do: functions by their source, objects by their class and attributes."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
import sysconfig
import types
from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import torch
from torch import nn

from featx.ir.graph import Graph

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Where installed code lies, which is told apart by its name alone.
_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen")


def without_addresses(text: str) -> str:
    """Return the repr of an object without its place in memory, which is another one in each process."""
    return _ADDRESS.sub("", text)


def fingerprint(value: object) -> str:
    """Return a hash of a value that is the same in each process, and another one for what may do something else.

    A function counts by its source, defaults, closure, and the globals that it names, as far as they are plain values
    or functions that are not installed. An object counts by its class and attributes, a tensor by its values.
    O(all that is held), about a second for a gigabyte of tensors.
    """
    return _Fingerprint().of(value)


def fingerprint_of_code(graph_module: nn.Module, graph: Graph) -> str:
    """Return a hash of the modules that a graph calls, without their parameters and buffers, and of its functions."""
    functions = [node.target for node in graph.nodes if node.op == "call_function"]
    return _Fingerprint(has_weights=False).of((dict(graph_module.named_children()), functions))


class _Fingerprint:
    """Follows values; one that is met again counts by its place."""

    def __init__(self, *, has_weights: bool = True) -> None:
        self._has_weights = has_weights
        self._met: dict[int, int] = {}
        self._alive: list[object] = []

    def of(self, value: Any) -> str:
        if isinstance(value, enum.Enum) or type(value) in _PLAIN:
            return f"{type(value).__qualname__} {value!r}"
        if id(value) in self._met:
            return f"the one at {self._met[id(value)]}"
        self._met[id(value)] = len(self._met)
        self._alive.append(value)
        parts = [type(value).__qualname__, *self._parts(value)]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()

    def _parts(self, value: Any) -> Iterable[str]:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return [part for key, item in items for part in (self.of(key), self.of(item))]
        if isinstance(value, (list, tuple)):
            return list(map(self.of, cast("list[Any]", value)))
        if isinstance(value, Set):
            return sorted(map(fingerprint, cast("Set[Any]", value)))
        if isinstance(value, functools.partial):
            return [self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, type):
            return [_name(value), "" if _is_installed(value) else _source(value)]
        if isinstance(value, nn.Module):
            return self._of_module(value)
        return self._of_object(value)

    def _of_tensor(self, tensor: torch.Tensor) -> list[str]:
        plain = tensor.detach().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
        return [str(tensor.dtype), str(tuple(tensor.shape)), hashlib.sha256(data).hexdigest()]

    def _of_function(self, function: types.FunctionType) -> list[str]:
        if _is_installed(function):
            return [_name(function)]
        cells = [_content(cell) for cell in function.__closure__ or ()]
        names = sorted({name for code in _codes_in(function.__code__) for name in code.co_names})
        named = {name: function.__globals__[name] for name in names if name in function.__globals__}
        used = {name: each for name, each in named.items() if not isinstance(each, types.ModuleType)}
        held = (function.__defaults__, function.__kwdefaults__, cells, used)
        # Two lambdas in one line have one source.
        code = function.__code__.co_code.hex() if function.__name__ == "<lambda>" else ""
        constants = [each for inner in _codes_in(function.__code__) for each in inner.co_consts if type(each) in _PLAIN]
        return [function.__qualname__, _source(function), code, repr(constants), *map(self.of, held)]

    def _of_module(self, module: nn.Module) -> list[str]:
        state = vars(module)
        plain = {name: value for name, value in state.items() if not name.startswith("_") and name != "training"}
        tensors = {**module._parameters, **module._buffers} if self._has_weights else {}
        hooks = [list(state[name].values()) for name in _HOOKS]
        return [self.of(type(module)), *map(self.of, (plain, tensors, dict(module._modules), hooks))]

    def _of_object(self, value: Any) -> list[str]:
        slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
        state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        state.update(getattr(value, "__dict__", {}))
        # What a library has warned of already is no part of what it does.
        state = {name: each for name, each in state.items() if "warning" not in name}
        if callable(value) and not state and hasattr(value, "__qualname__"):  # a function in C
            return [_name(value)]
        return [self.of(type(value)), self.of(state)]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _codes_in(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _is_installed(value: Any) -> bool:
    try:
        file = inspect.getfile(value)
    except (TypeError, OSError):
        return getattr(value, "__module__", None) != "__main__"
    return "site-packages" in file or file.startswith(_INSTALLED)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}"


def _source(value: Any) -> str:
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        code: types.CodeType | None = getattr(value, "__code__", None)
        return "" if code is None else f"{code.co_code!r}{without_addresses(repr(code.co_consts))}"
