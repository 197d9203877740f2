"""Copy the Python objects that a model keeps, so that a trace may change the copies.

Tensors, classes, Python modules and objects of libraries in C are shared. Lists, dicts, sets, plain objects, functions
with state of their own and the iterators of Python are copied, at any depth and each once.
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import functools
import io
import itertools
import queue
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from featx.rebuilding import NO_VALUE, contents_of_cell, slots_of
from featx.tracing.file_globals.kept_iterators import UncopiedIterator
from featx.tracing.objects.containers import DEPTH_IN_MODULES, LARGE
from featx.tracing.objects.plain_objects import LIBRARIES, is_plain_object
from featx.tracing.objects.references import proxied
from featx.tracing.replica.unfinalized import bare_copy_of

_ATOMS = frozenset(
    {
        bool, float, complex, str, bytes, range, type(None), type(Ellipsis), type(NotImplemented), type, object,
        torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
        types.ModuleType, types.CodeType, types.WrapperDescriptorType, types.MethodDescriptorType,
    }
)  # fmt: skip
# What Python copies with its state.
_COPIED_BY_PYTHON = (
    array.array, bytearray, io.BytesIO, io.StringIO, random.Random,
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)  # fmt: skip
# Larger ones are data sets or vocabularies. Copying them for each run would take longer than the run.
_LARGEST = 100_000


class ObjectCopies:
    """Copies objects; `known` holds copies by the id of the original, with the original, which must stay alive.

    Args:
        copy_tensor: copies a tensor, or returns it.
        copy_module: copies a module.
        shared: the ids of the lists, dicts and attributes of objects that are not copied.
    """

    def __init__(
        self,
        copy_tensor: Callable[[torch.Tensor], torch.Tensor],
        copy_module: Callable[[Any], Any],
        shared: Collection[int] = (),
    ) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}
        # Whether there are objects in which code can keep a state that no attribute, list, dict or set shows.
        self.have_hidden_state = False
        # How deep `of` is in containers and objects.
        self._depth = 0
        self._copy_tensor = copy_tensor
        self._copy_module = copy_module
        self._shared = shared

    def of(self, value: Any) -> Any:
        """Return the copy of `value`, or `value` itself where it is shared. O(size of what it holds)."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is int:
            return self.of_id(value)
        known = self.known.get(id(value))
        if known is not None:
            return known[1]
        if self._shared and (id(value) in self._shared or id(getattr(value, "__dict__", None)) in self._shared):
            return value
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if isinstance(value, torch.nn.Module) and kind not in weakref.ProxyTypes:
            return self._copy_module(value)
        self._depth += 1
        if self._depth > DEPTH_IN_MODULES:
            self.have_hidden_state = True
        maker = _MAKERS.get(kind)
        duplicate = self._of_other(value, kind) if maker is None else maker(self, value)
        self._depth -= 1
        return duplicate

    def of_id(self, number: int) -> int:
        """Return the id of the copy where a number is that of an object that is copied, as in `names[id(layer)]`."""
        known = self.known.get(number)
        return number if known is None else id(known[1])

    def look_at_large(self, value: Collection[Any], items: Iterable[Any]) -> None:
        """Note what the containers hold that are inside a large one, into which `ModuleState` does not look."""
        if len(value) > LARGE and any(type(item) in (list, dict, set) or is_plain_object(item) for item in items):
            self.have_hidden_state = True

    def note(self, original: Any, duplicate: Any) -> Any:
        """Remember the copy of an object, and return it."""
        self.known[id(original)] = (original, duplicate)
        return duplicate

    def fill_attributes(self, original: Any, duplicate: Any) -> Any:
        """Copy the attributes of an object, in its `__dict__` and in slots, to its copy. Return the copy."""
        state: dict[str, Any] | None = getattr(original, "__dict__", None)
        if type(state) is dict:
            object.__getattribute__(duplicate, "__dict__").update(
                {name: self.of(value) for name, value in list(state.items())}
            )
        self.fill_slots(original, duplicate)
        return duplicate

    def fill_slots(self, original: Any, duplicate: Any) -> None:
        """Copy the values of the slots of an object to its copy."""
        for slot in slots_of(type(original)):
            value = getattr(original, slot.__name__, NO_VALUE)
            if value is not NO_VALUE:
                slot.__set__(duplicate, self.of(value))

    def _of_other(self, value: Any, kind: type) -> Any:
        if isinstance(value, (type, int, float, str, bytes, BaseException, enum.Enum)):
            return value
        for base, maker in _BASES:
            if isinstance(value, base):
                return maker(self, value)
        if kind.__module__.partition(".")[0] == "numpy":
            self.have_hidden_state = True
            is_view_of_shared = id(getattr(value, "base", None)) in self._shared
            return value if is_view_of_shared else self.note(value, _copy_of_numpy(self, value))
        if isinstance(value, _COPIED_BY_PYTHON) or (isinstance(value, Iterator) and not hasattr(value, "read")):
            return self.note(value, self._copied_by_python(value))
        if is_plain_object(value):
            return self.fill_attributes(value, self.note(value, bare_copy_of(value)))
        return value

    def _copied_by_python(self, value: Any) -> Any:
        self.have_hidden_state = True
        if is_plain_object(value):
            return self.fill_attributes(value, bare_copy_of(value))
        memo = {key: duplicate for key, (_, duplicate) in self.known.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 copies no iterator of itertools
                return copy.deepcopy(value, memo)
        except (TypeError, RuntimeError):
            return UncopiedIterator(value) if isinstance(value, Iterator) else value


def _list(copies: ObjectCopies, value: list[Any]) -> list[Any]:
    items = list(list.__iter__(value))  # whatever a class overrides
    copies.look_at_large(items, items)
    duplicate: list[Any] = copies.note(value, type(value).__new__(type(value)))
    list.extend(duplicate, items if _holds_atoms(items) else map(copies.of, items))
    return copies.fill_attributes(value, duplicate)


def _tuple(copies: ObjectCopies, value: tuple[Any, ...]) -> tuple[Any, ...]:
    originals = tuple(tuple.__iter__(value))  # a class may have a length of its own
    if _holds_atoms(originals):
        return value
    items = [copies.of(item) for item in originals]
    if all(one is other for one, other in zip(items, originals, strict=True)):
        return value
    kind: Any = type(value)
    return copies.note(value, kind(items) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, items))


def _dict(copies: ObjectCopies, value: dict[Any, Any]) -> dict[Any, Any]:
    kind: Any = type(value)
    base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    # Whatever a class overrides, in the order that it has after `move_to_end` too.
    items = dict(list(cast(Any, base).items(value)))
    copies.look_at_large(items, items.values())
    duplicate: Any = copies.note(value, kind.__new__(kind))
    if isinstance(value, collections.defaultdict):
        duplicate.default_factory = copies.of(cast(Any, value).default_factory)
    copies.fill_attributes(value, duplicate)
    if not (_holds_atoms(items) and _holds_atoms(items.values())):
        items = {copies.of(key): copies.of(item) for key, item in items.items()}
    for key, item in items.items():
        base.__setitem__(duplicate, key, item)
    return duplicate


def _set(copies: ObjectCopies, value: Any) -> Any:
    kind: Any = type(value)
    if _holds_atoms(value):
        return copies.note(value, kind.copy(value))
    return copies.note(value, kind(copies.of(item) for item in set(value)))


def _deque(copies: ObjectCopies, value: collections.deque[Any]) -> collections.deque[Any]:
    copies.have_hidden_state = True
    duplicate: collections.deque[Any] = copies.note(value, type(value)(maxlen=value.maxlen))
    duplicate.extend(map(copies.of, list(value)))
    return duplicate


def _function(copies: ObjectCopies, value: types.FunctionType) -> types.FunctionType:
    if is_of_library(value) or not (value.__closure__ or value.__dict__ or value.__defaults__ or value.__kwdefaults__):
        return value
    if not value.__closure__ and not value.__dict__ and _holds_atoms(value.__defaults__ or ()):
        return value
    copies.have_hidden_state = True
    fresh = {id(cell): cell for cell in value.__closure__ or () if id(cell) not in copies.known}
    for cell in fresh.values():
        copies.note(cell, types.CellType())
    cells = tuple([copies.known[id(cell)][1] for cell in value.__closure__ or ()])
    duplicate = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
    copies.note(value, duplicate)
    for cell in fresh.values():
        contents = contents_of_cell(cell)
        if contents is not NO_VALUE:
            copies.known[id(cell)][1].cell_contents = copies.of(contents)
    duplicate.__defaults__ = copies.of(value.__defaults__)
    duplicate.__kwdefaults__ = copies.of(value.__kwdefaults__)
    duplicate.__dict__.update({name: copies.of(item) for name, item in value.__dict__.items()})
    for name in ("__module__", "__qualname__", "__doc__"):
        setattr(duplicate, name, getattr(value, name))
    return duplicate


def _method(copies: ObjectCopies, value: types.MethodType) -> types.MethodType:
    function, owner = copies.of(value.__func__), copies.of(value.__self__)
    return value if function is value.__func__ and owner is value.__self__ else types.MethodType(function, owner)


def _builtin_method(copies: ObjectCopies, value: Any) -> Any:
    owner = value.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        return value
    duplicate = copies.of(owner)
    return value if duplicate is owner else getattr(duplicate, value.__name__)


def _cached(copies: ObjectCopies, value: Any) -> Any:
    copies.have_hidden_state = True
    function = copies.of(value.__wrapped__)
    if function is value.__wrapped__:
        return value
    return copies.note(value, functools.lru_cache(**value.cache_parameters())(function))


def _partial(copies: ObjectCopies, value: functools.partial[Any]) -> functools.partial[Any]:
    duplicate = type(value)(copies.of(value.func), *copies.of(value.args), **copies.of(value.keywords))
    duplicate.__dict__.update({name: copies.of(item) for name, item in value.__dict__.items()})
    return copies.note(value, duplicate)


def _reference(copies: ObjectCopies, value: weakref.ref[Any]) -> weakref.ref[Any]:
    target = value()
    known = None if target is None else copies.known.get(id(target))
    return value if known is None else weakref.ref(known[1])


def _handle(copies: ObjectCopies, value: RemovableHandle) -> RemovableHandle:
    """Copy what removes a hook, with the dict of hooks that it is in."""
    duplicate = copies.note(value, bare_copy_of(value))
    duplicate.__dict__.update(value.__dict__)
    duplicate.hooks_dict_ref = _reference_to_copy(copies, value.hooks_dict_ref)
    duplicate.extra_dict_ref = tuple(_reference_to_copy(copies, each) for each in value.extra_dict_ref or ())
    return duplicate


def _reference_to_copy(copies: ObjectCopies, value: weakref.ref[Any]) -> weakref.ref[Any]:
    target = value()
    return value if target is None else weakref.ref(copies.of(target))


def _proxy(copies: ObjectCopies, value: Any) -> Any:
    known = copies.known.get(id(proxied(value)))
    return value if known is None else weakref.proxy(known[1])


def _generator(copies: ObjectCopies, value: torch.Generator) -> torch.Generator:
    return copies.note(value, value.clone_state())


_MAKERS: dict[type, Callable[[ObjectCopies, Any], Any]] = {
    list: _list, tuple: _tuple, dict: _dict, set: _set, frozenset: _set, collections.deque: _deque,
    types.FunctionType: _function, types.MethodType: _method, functools.partial: _partial, weakref.ref: _reference,
    weakref.ProxyType: _proxy, weakref.CallableProxyType: _proxy,
    torch.Generator: _generator, types.BuiltinMethodType: _builtin_method, types.MethodWrapperType: _builtin_method,
    functools._lru_cache_wrapper: _cached,
}  # fmt: skip


def _namespace(copies: ObjectCopies, value: Any) -> Any:
    copies.have_hidden_state = True
    kind: Any = type(value)
    duplicate = copies.note(value, kind.__new__(kind))
    for name, item in list(vars(value).items()):
        setattr(duplicate, name, copies.of(item))
    return duplicate


def _queue(copies: ObjectCopies, value: queue.Queue[Any]) -> queue.Queue[Any]:
    kind: Any = type(value)
    duplicate: Any = copies.fill_attributes(value, copies.note(value, object.__new__(kind)))

    def get_at_once(*args: Any, **kwargs: Any) -> Any:
        """Raise where there is nothing: no other thread puts something into a copy, and forward would wait for ever."""
        return kind.get(duplicate, block=False)

    duplicate.__dict__["get"] = get_at_once
    return duplicate


# Subclasses, in the order in which they are asked for.
_BASES: tuple[tuple[type, Callable[[ObjectCopies, Any], Any]], ...] = (
    (dict, _dict), (list, _list), (tuple, _tuple), (set, _set), (frozenset, _set),
    (collections.deque, _deque), (functools.partial, _partial), (threading.local, _namespace),
    (types.SimpleNamespace, _namespace), (queue.Queue, _queue), (RemovableHandle, _handle),
)  # fmt: skip


def _holds_atoms(values: Any) -> bool:
    return len(values) > _LARGEST or _ATOMS.issuperset(map(type, values))


def _copy_of_numpy(copies: ObjectCopies, value: Any) -> Any:
    if hasattr(value, "bit_generator") or type(value).__name__ == "RandomState":
        return copy.deepcopy(value)
    if not hasattr(value, "nbytes"):
        return value
    whole: Any = getattr(value, "base", None)
    is_view = type(whole) is type(value) and whole.flags.c_contiguous and whole.nbytes <= _LARGEST
    if not is_view:
        return value.copy()
    start, start_of_whole = (each.__array_interface__["data"][0] for each in (value, whole))
    return type(value)(value.shape, value.dtype, copies.of(whole), start - start_of_whole, value.strides)


def is_of_library(function: types.FunctionType) -> bool:
    """Say whether a function is of Python, torch, numpy or featx."""
    return str(function.__module__).partition(".")[0] in LIBRARIES
