"""A hash that tells values apart by what they do: functions by their source, objects by their class and attributes."""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import inspect
import io
import json
import logging
import re
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Set
from operator import itemgetter
from pathlib import PurePath
from typing import Any, cast

import torch
from torch import nn

from featx.ir.graph import Graph
from featx.ir.paths import held_at
from featx.rebuilding import contents_of_cell
from featx.tracing.objects.module_parts import forward_of
from featx.tracing.source.attributes import assigned_by
from featx.tracing.source.location import codes_in
from featx.tree import tree_leaves

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)
_OF_EACH_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Where installed code lies, which is told apart by its name alone.
_INSTALLED = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, "<frozen")


def without_addresses(text: str) -> str:
    """Return the repr of an object without its place in memory, which is another one in each process."""
    return _ADDRESS.sub("", text)


def fingerprint(value: object) -> str:
    """Return a hash of a value that is the same in each process, and another one for what may do something else.

    A function counts by its source, defaults and closure, and by what it names in its own file and in imported ones:
    functions, classes, modules, tensors and plain values. A class counts by its methods and its plain values, and by
    those of its base classes; an object by its class and attributes, a tensor by its values. What is installed counts
    by its name alone. O(all that is held), about a second for a gigabyte of tensors.
    """
    return _Fingerprint().of(value)


def fingerprint_of_code(graph_module: nn.Module, graph: Graph) -> str:
    """Return a hash of the modules that a graph calls, without their parameters and buffers, and of its functions.

    Tensors that it reads and that are no parameters or buffers count too, and functions that it passes on.
    """
    functions = [node.target for node in graph.nodes if node.op == "call_function"]
    given = (leaf for node in graph.nodes for leaf in tree_leaves((node.args, node.kwargs)))
    functions += [each for each in given if isinstance(each, (types.FunctionType, types.MethodType, functools.partial))]
    state = {id(tensor) for tensor in (*graph_module.parameters(), *graph_module.buffers())}
    read = {str(node.target): held_at(graph_module, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    plain = {path: value for path, value in read.items() if isinstance(value, torch.Tensor) and id(value) not in state}
    return _Fingerprint(without=graph_module).of((dict(graph_module.named_children()), functions, plain))


def fingerprint_of_modules(model: nn.Module) -> str:
    """Return a hash of a model and all modules inside it, without their parameters and buffers."""
    return _Fingerprint(without=model).of(model)


class _Fingerprint:
    """Follows values; one that is met again counts by its place.

    Args:
        without: the module whose parameters and buffers do not count, wherever they are held: recurrent layers have
            a list of theirs.
        is_for_order: the hash is for sorting, and of sets the length alone counts.
    """

    def __init__(self, *, without: nn.Module | None = None, is_for_order: bool = False) -> None:
        self._is_for_order = is_for_order
        self._has_weights = without is None
        tensors = () if without is None else (*without.parameters(), *without.buffers())
        self._weights = {id(tensor) for tensor in tensors}
        self._met: dict[int, int] = {}
        self._alive: list[object] = []

    def of(self, value: Any) -> str:
        if isinstance(value, enum.Enum) or type(value) in _PLAIN:
            return f"{type(value).__qualname__} {value!r}"
        if id(value) in self._weights:
            return f"a weight {value.dtype} {tuple(value.shape)}"
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
            return self._of_set(cast("Set[Any]", value))
        if isinstance(value, functools.partial):
            return [self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, types.FunctionType):
            return self._of_function(value)
        if isinstance(value, PurePath):  # which remembers parts of its text
            return [str(value)]
        if isinstance(value, _Other):
            return [_name(value.kind)]
        if isinstance(value, types.ModuleType):
            held = {} if _is_installed(value) else {name: _followed(each) for name, each in vars(value).items()}
            return [value.__name__, *(self.of(held[name]) for name in sorted(held) if not name.startswith("__"))]
        if isinstance(value, (io.BytesIO, io.StringIO)):
            return [self.of(value.getvalue())]
        if isinstance(value, (torch.Generator, Iterator)) or type(value).__module__.startswith("numpy.random"):
            return [_name(type(value))]  # drawn from, it is another one
        if hasattr(value, "__wrapped__"):  # a cached function
            return [self.of(value.__wrapped__)]
        if isinstance(value, torch.jit.ScriptFunction):
            return [str(value.name), str(value.code)]
        if isinstance(value, type):
            return [_name(value), *self._of_members(cast("type[Any]", value))]
        if isinstance(value, nn.Module):
            return self._of_module(value)
        if isinstance(value, logging.Logger):  # it notes for which levels it has been called
            return [value.name]
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # of numpy
            if value.dtype.hasobject:  # whose bytes are addresses
                return [str(value.dtype), str(value.shape), self.of(value.tolist())]
            return [str(value.dtype), str(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        return self._of_object(value)

    def _of_set(self, items: Set[Any]) -> list[str]:
        if self._is_for_order:
            return [str(len(items))]
        # In the same order in each process; items that differ in nothing but sets inside them may swap places.
        return list(map(self.of, sorted(items, key=lambda item: _Fingerprint(is_for_order=True).of(item))))

    def _of_tensor(self, tensor: torch.Tensor) -> list[str]:
        if tensor.is_meta:
            return [str(tensor.dtype), str(tuple(tensor.shape))]
        if tensor.is_quantized or tensor.is_mkldnn:
            plain = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
            return [str(tensor.dtype), *self._of_tensor(plain)]
        if tensor.layout is not torch.strided or tensor.is_nested:  # it is made of several tensors
            return [str(tensor.dtype), *map(self.of, tensor.detach().cpu().__reduce_ex__(2)[:2])]
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
        return [str(tensor.dtype), str(tuple(tensor.shape)), hashlib.sha256(data).hexdigest()]

    def _of_function(self, function: types.FunctionType) -> list[str]:
        if _is_installed(function):
            return [_name(function), *map(self.of, _wrapped_by(function))]
        cells = [contents_of_cell(cell, None) for cell in function.__closure__ or ()]
        used = {name: _followed(each) for name, each in sorted(_named_by(function), key=itemgetter(0))}
        held = (function.__defaults__, function.__kwdefaults__, cells, used)
        # Two lambdas in one line have one source.
        code = _text_of_code(function.__code__) if function.__name__ == "<lambda>" else ""
        constants = [each for inner in codes_in(function.__code__) for each in inner.co_consts if type(each) in _PLAIN]
        # `inspect.getsource` gives the source of what `functools.wraps` names, and the wrapper has its own.
        wrapper = [_text_of_code(function.__code__)] if hasattr(function, "__wrapped__") else []
        return [function.__qualname__, _source(function), code, *wrapper, repr(constants), *map(self.of, held)]

    def _of_members(self, kind: type[Any]) -> Iterable[str]:
        for base in kind.__mro__:
            for name, member in vars(base).items() if not _is_installed(base) else ():
                held = _held_by_member(member)
                function = held if isinstance(held, types.FunctionType) else None
                if function is not None and function.__code__.co_filename == "<string>":  # of a dataclass
                    continue
                if function is not None or (not name.startswith("__") and _is_followed(held)):
                    yield f"{name} {self.of(_followed(held))}"

    def _of_module(self, module: nn.Module) -> list[str]:
        state = vars(module)
        notes = assigned_by(forward_of(module), type(module)) or ()
        plain = {
            name: value
            for name, value in state.items()
            if name not in _OF_EACH_MODULE and (not name.startswith("_") or (name not in notes and _is_followed(value)))
        }
        tensors = {**module._parameters, **module._buffers} if self._has_weights else {}
        hooks = [list(state[name].values()) for name in _HOOKS]
        return [self.of(type(module)), *map(self.of, (plain, tensors, dict(module._modules), hooks))]

    def _of_object(self, value: Any) -> list[str]:
        slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
        state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        state.update(getattr(value, "__dict__", {}))
        state.pop("deprecation_warnings", None)  # of what a tokenizer has warned already
        if callable(value) and not state and hasattr(value, "__qualname__"):  # a function in C
            owner = getattr(value, "__self__", None)
            return [_name(value), *([] if isinstance(owner, types.ModuleType) else [self.of(owner)])]
        return [self.of(type(value)), self.of(state), *([] if state else self._of_reduced(value))]

    def _of_reduced(self, value: Any) -> list[str]:
        """Return parts of what an object in C is built again from when it is pickled; of what is not pickled, none."""
        if hasattr(value, "to_str") and hasattr(value, "truncation"):  # a tokenizer, which notes how it was last called
            settings = json.loads(value.to_str())
            return [self.of({name: each for name, each in settings.items() if name not in ("truncation", "padding")})]
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced: Any = value.__reduce_ex__(2) if reduce is None else reduce(value)
        except Exception:  # it refuses, each in its own way
            return []
        if isinstance(reduced, str):
            return [reduced]
        items = [list(each) for each in reduced[3:5] if each is not None]
        return list(map(self.of, (*reduced[:3], *items)))


def _named_by(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    """Yield the globals that a function names, and those that it may name in Python modules which are not installed."""
    names = {name for code in codes_in(function.__code__) for name in code.co_names}
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            yield name, value
        else:
            yield from _named_in(value, name, names, set())


def _named_in(module: types.ModuleType, name: str, names: Set[str], known: Set[int]) -> Iterable[tuple[str, Any]]:
    """Yield what code may name in a Python module that is not installed, and in those inside it: `package.part.f`."""
    if id(module) in known or _is_installed(module):
        return
    for each in sorted(names & vars(module).keys()):
        value = vars(module)[each]
        if isinstance(value, types.ModuleType):
            yield from _named_in(value, f"{name}.{each}", names, {*known, id(module)})
        else:
            yield f"{name}.{each}", value


class _Other:
    """Stands for an object of a library of which the class alone counts, such as a lock."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind


def _followed(value: Any, known: dict[int, Any] | None = None) -> Any:
    """Return what counts of a global: it, the items of a container that do, or its class alone. O(items)."""
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Mapping):
        items: dict[Any, Any] = {}
        known[id(value)] = items
        items.update((key, _followed(item, known)) for key, item in cast("Mapping[Any, Any]", value).items())
        return items
    if isinstance(value, (tuple, list)):
        parts: list[Any] = []
        known[id(value)] = parts
        parts += [_followed(item, known) for item in cast("list[Any]", value)]
        return parts
    return value if _is_followed(value) else _Other(type(value))


def _is_followed(value: Any) -> bool:
    """Say whether a global is part of what a function does; handles of libraries, such as locks, are not."""
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type, torch.Tensor, nn.Module)):
        return True
    if isinstance(value, (PurePath, tuple, list, Set, Mapping)):
        return True
    if hasattr(value, "__wrapped__") or isinstance(value, (*_PLAIN, enum.Enum, torch.jit.ScriptFunction)):
        return True
    return (hasattr(value, "tobytes") and hasattr(value, "dtype")) or not _is_installed(type(value))


def _held_by_member(member: Any) -> Any:
    """Return what a member of a class holds: the function of a property, a partial for a partialmethod."""
    if isinstance(member, functools.partialmethod):
        return functools.partial(cast("Any", member.func), *member.args, **member.keywords)
    for name in ("__func__", "fget", "func"):  # of static and class methods, properties, cached ones
        member = getattr(member, name, member)
    return member


def _wrapped_by(function: types.FunctionType) -> list[Any]:
    """Return the functions that an installed one, such as what `torch.no_grad()` makes of a function, calls."""
    wrapped = getattr(function, "__wrapped__", None)
    if hasattr(function, "registry") and hasattr(function, "dispatch"):  # of functools.singledispatch
        return [wrapped, dict(cast("Any", function).registry)]
    if wrapped is not None:
        return [wrapped]
    held = (contents_of_cell(cell, None) for cell in function.__closure__ or ())
    return [each for each in held if isinstance(each, (types.FunctionType, types.MethodType, functools.partial))]


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
        return "" if code is None else _text_of_code(code)


def _text_of_code(code: types.CodeType) -> str:
    """Return what tells code apart that has no source of its own."""
    parts = [
        (each.co_code, each.co_names, each.co_varnames, each.co_freevars, list(map(_text_of_constant, each.co_consts)))
        for each in codes_in(code)
    ]
    return repr(parts)


def _text_of_constant(value: object) -> str:
    """Return a text that is the same in each process: the order of a set, and where code inside lies, are not."""
    if isinstance(value, frozenset):
        return f"a set of {sorted(map(_text_of_constant, cast('frozenset[object]', value)))}"
    if isinstance(value, tuple):
        return f"a tuple of {list(map(_text_of_constant, cast('tuple[object, ...]', value)))}"
    return "code" if isinstance(value, types.CodeType) else without_addresses(repr(value))
