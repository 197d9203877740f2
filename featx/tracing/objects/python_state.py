"""Describe the state that Python objects hold, so that what it was at two moments can be compared.

Iterators, closures, arrays, buffers of bytes, queues and plain objects have state that a call may advance although it
does the same as the call before: `next(self.steps) < 100`.
"""

from __future__ import annotations

import array
import functools
import io
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from featx.rebuilding import attributes_of, contents_of_cell
from featx.tracing.objects.arrays import description_of, is_array
from featx.tracing.objects.containers import DEPTH_IN_MODULES, methods_of
from featx.tracing.objects.plain_objects import PLAIN_TYPES, VALUES, is_plain_object

_COMPARABLE = PLAIN_TYPES | {bytes, range}
_TENSORS = frozenset({torch.Tensor, nn.Parameter})
_OTHERS = (torch.Tensor, nn.Module, type, types.ModuleType)
# Larger objects are data sets or vocabularies: their length is compared alone.
_LARGEST = 10_000


class PythonState:
    """Describes values one after the other; an object that was described before is not described again.

    Tensors are described by their class and shape, modules and classes by their class. O(size of what the values hold).
    """

    def __init__(self) -> None:
        # By id, with the object, which must stay alive.
        self._known: dict[int, object] = {}

    def of(self, value: object, depth: int = 2 * DEPTH_IN_MODULES) -> Any:
        """Return a description that equals another one if the value holds the same at both moments."""
        kind = type(value)
        if kind in _COMPARABLE:
            return value
        if isinstance(value, (int, float)):  # a number of a trace among them
            return kind.__qualname__, int.__repr__(value) if isinstance(value, int) else float.__repr__(value)
        if isinstance(value, VALUES):
            return kind.__qualname__, repr(value)
        if isinstance(value, torch.Tensor) and kind in _TENSORS:
            return kind.__qualname__, *value.shape
        if id(value) in self._known or issubclass(kind, _OTHERS) or not depth or _is_stateless_function(value):
            return kind.__qualname__
        self._known[id(value)] = value
        return kind.__qualname__, *(self.of(part, depth - 1) for part in _parts_of(value))


def _is_stateless_function(value: Any) -> bool:
    """Say whether a value is a function that holds nothing: many modules may share it, as their activation."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    if not isinstance(value, types.FunctionType):
        return False
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return not value.__closure__ and not value.__dict__ and all(type(each) in _COMPARABLE for each in defaults)


def objects_in(value: object) -> Iterator[object]:
    """Yield an object and what it holds, each once: variables of closures, attributes, items. O(what it holds)."""
    known: dict[int, object] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        if type(value) not in _COMPARABLE and id(value) not in known:
            known[id(value)] = value
            yield value
            pending += [] if isinstance(value, _OTHERS) else _parts_of(value)


def _parts_of(value: Any) -> Iterable[Any]:
    for kinds, parts_of in _PARTS:
        if isinstance(value, kinds):
            return parts_of(value)
    if is_array(value):
        return description_of(value)
    if isinstance(value, Iterator):
        return _parts_of_iterator(cast(Any, value))
    return attributes_of(value).values() if is_plain_object(value) else ()


def _parts_of_container(value: Any) -> Iterable[Any]:
    if len(value) > _LARGEST:
        return (len(value),)
    if isinstance(value, dict):
        methods = methods_of(value)
        return [*methods.keys(value), *methods.values(value)]
    return list(value)


def _parts_of_set(value: Any) -> Iterable[Any]:
    plain = () if len(value) > _LARGEST else (repr(item) for item in value if type(item) in _COMPARABLE)
    return len(value), *sorted(plain)


def _parts_of_function(function: types.FunctionType) -> Iterable[Any]:
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    yield from (contents_of_cell(cell, None) for cell in function.__closure__ or ())


def _parts_of_iterator(value: Any) -> Iterable[Any]:
    # What pickles it says how far it is. Those of itertools have no such method in Python 3.14.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return value.__reduce__()
    except TypeError:
        return ()


_PARTS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    ((dict, list, tuple, deque), _parts_of_container),
    ((set, frozenset), _parts_of_set),
    (types.FunctionType, _parts_of_function),
    (types.MethodType, lambda method: (method.__func__, method.__self__)),
    ((types.BuiltinMethodType, types.MethodWrapperType), lambda method: (method.__self__,)),
    (functools.partial, lambda partial: (partial.func, partial.args, partial.keywords)),
    ((array.array, bytearray), lambda numbers: (bytes(numbers),)),
    ((io.BytesIO, io.StringIO), lambda file: (file.getvalue(), file.tell())),
    ((types.SimpleNamespace, threading.local), lambda namespace: vars(namespace).values()),
)
