"""What stands in for an array that numpy makes of sizes: `np.array(x.shape[2:]) % 32`.

It holds a number of numpy for each item, and computes with each. It does no more than what `number_uses` reads from
the source, and stands in for an array only where that is all that forward does.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from featx.tracing.guards.scalars import TracedInt, TracedNumber, in_numpy, pin_all, plain_numbers
from featx.tracing.objects.arrays import functions_of_sizes, is_reduction, is_ufunc
from featx.tracing.objects.replaced_globals import original_of
from featx.tracing.recording.numpy_numbers import NumpyNumbers, is_number, kind_of_64_bits
from featx.tracing.source.frames import is_of_featx
from featx.tracing.source_uses.number_uses import is_used_as_array
from featx.tracing.source_uses.syntax_queries import is_in_try

if TYPE_CHECKING:
    from featx.tracing.recording.recorder import Recorder

_OPERATORS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power",
}  # fmt: skip
_COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip


class NumpyArrays:
    """The arrays of one trace that numpy makes of sizes.

    Args:
        recorder: knows the code that runs.
        numbers: computes the items.
    """

    def __init__(self, recorder: Recorder, numbers: NumpyNumbers) -> None:
        self._recorder = recorder
        self.numbers = numbers

    def make(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer `np.array` or `np.asarray` of a tuple or list of sizes."""
        given: Any = args[0] if len(args) in (1, 2) and not kwargs.keys() - {"dtype"} else None
        kind = kind_of_64_bits(args[1] if len(args) == 2 else kwargs.get("dtype", "int64"))
        are_sizes = isinstance(given, (tuple, list)) and all(map(_is_size, given))
        is_traced = are_sizes and any(isinstance(item, TracedNumber) for item in given)
        if kind is None or not is_traced or not self._may_be_array():
            return function(*args, **kwargs)
        return TracedArray(self, _objects([self.numbers.compute(kind, (item,), is_item=True) for item in given]))

    def result(self, items: Any) -> Any:
        """Return what stands in for an array of these items, or for the one of them; or it, with its numbers fixed."""
        if items.ndim == 0:
            item = items[()]
            return item if type(item) is not TracedInt or self.numbers.may_be_int() else self.numbers.fixed(item)
        array = TracedArray(self, items)
        is_traced = any(isinstance(item, TracedNumber) for item in items.flat)
        return array if is_traced and self._may_be_array() else fixed(array)

    def apply(self, ufunc: Any, inputs: tuple[Any, ...]) -> Any:
        """Answer a universal function of arrays and numbers."""
        numpy = sys.modules["numpy"]
        known = list(map(_as_objects, inputs))
        if not is_ufunc(ufunc) or any(operand is None for operand in known):
            return ufunc(*map(fixed, inputs))
        operands = numpy.broadcast_arrays(*known)
        items = numpy.empty(operands[0].shape, object)
        for index in numpy.ndindex(items.shape):
            items[index] = self.numbers.compute(ufunc, tuple(each[index] for each in operands), is_item=True)
        return self.result(items)

    def reduce(self, function: Callable[..., Any], array: TracedArray) -> Any:
        """Answer a function that makes one number of all items."""
        number = self.numbers.compute(function, (tuple(array.items.flat),), is_item=True)
        return self.result(_objects(number))

    def may_be_caught(self) -> bool:
        """Say whether code around that which runs goes on where that raises an error."""
        frame = self._recorder.model_frame()
        while frame is not None and frame is not self._recorder.caller:
            if not is_of_featx(frame.f_code) and is_in_try(frame):
                return True
            frame = frame.f_back
        return False

    def _may_be_array(self) -> bool:
        frame = self._recorder.model_frame()
        return frame is not None and is_used_as_array(frame)


class TracedArray:
    """Stands in for an array of int64 or float64.

    Attributes:
        items: an array of objects: numbers of numpy, of which some are traced.
        shape: its sizes.
        ndim: how many there are.
        size: how many items it has.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, arrays: NumpyArrays, items: Any) -> None:
        self._arrays = arrays
        self.items = items
        self.shape, self.ndim, self.size = items.shape, items.ndim, items.size

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What code that asks for the class of an array is told."""
        return sys.modules["numpy"].ndarray

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Answer a universal function of numpy."""
        if method == "__call__" and not kwargs:
            return self._arrays.apply(ufunc, inputs)
        return getattr(ufunc, method)(*map(fixed, inputs), **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Answer another function of numpy."""
        name, is_of_one = function.__name__, len(args) == 1 and not kwargs
        if name in ("all", "any") and is_of_one:
            return getattr(self, name)()
        if name == "array_equal" and len(args) == 2 and not kwargs:
            return _are_equal(*args)
        if is_reduction(function) and is_of_one:
            return self._arrays.reduce(function, self)
        return function(*map(fixed, args), **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return fixed(self).__array__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        function = functions_of_sizes().get(name)
        if function is None or not is_reduction(function):
            raise AttributeError(f"'numpy.ndarray' object has no attribute '{name}'", name=name, obj=self)
        return lambda *args, **kwargs: (
            getattr(fixed(self), name)(*args, **kwargs) if args or kwargs else self._arrays.reduce(function, self)
        )

    def __getitem__(self, key: Any) -> Any:
        found = self.items[plain_numbers(key)]
        items = found if isinstance(found, sys.modules["numpy"].ndarray) else _objects(found)
        return self._arrays.result(items) if items.size else fixed(self)[key]

    def __iter__(self) -> Iterator[Any]:
        """Yield the items. The source says that their class does not matter."""
        return iter(self.items) if self.ndim == 1 else (self[index] for index in range(self.shape[0]))

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        return bool(fixed(self))

    def __format__(self, spec: str) -> str:
        traces = (item.trace for item in self.items.flat if isinstance(item, TracedNumber))
        is_message = not self._arrays.may_be_caught() and all(trace.is_message() for trace in traces)
        return format(_plain(self.items) if is_message else fixed(self), spec)

    def __neg__(self) -> Any:
        return sys.modules["numpy"].negative(self)

    def __pos__(self) -> Any:
        return self.copy()

    def all(self, *args: Any, **kwargs: Any) -> Any:
        """Say whether all items are other than zero."""
        return self._are_true().all(*args, **kwargs)

    def any(self, *args: Any, **kwargs: Any) -> Any:
        """Say whether an item is other than zero."""
        return self._are_true().any(*args, **kwargs)

    def _are_true(self) -> Any:
        return sys.modules["numpy"].not_equal(self, 0)

    def tolist(self) -> Any:
        """Return the items as numbers of Python."""
        return _each(lambda item: item.item(), self.items).tolist()

    def copy(self) -> Any:
        """Return an array with the same items."""
        return self._arrays.result(self.items)

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the items as int64 or float64."""
        kind = kind_of_64_bits(dtype)
        if kind is None or args or kwargs:
            return fixed(self).astype(original_of(dtype), *args, **kwargs)
        compute = self._arrays.numbers.compute
        return self._arrays.result(_each(lambda item: compute(kind, (item,), is_item=True), self.items))


def _define(name: str, ufunc: str) -> None:
    operation = getattr(operator, name)

    def direct(self: TracedArray, other: Any) -> Any:
        is_known = _as_objects(other) is not None
        return getattr(sys.modules["numpy"], ufunc)(self, other) if is_known else operation(fixed(self), other)

    def reflected(self: TracedArray, other: Any) -> Any:
        is_known = _as_objects(other) is not None
        return getattr(sys.modules["numpy"], ufunc)(other, self) if is_known else operation(other, fixed(self))

    setattr(TracedArray, f"__{name}__", direct)
    if name in _OPERATORS:
        setattr(TracedArray, f"__r{name}__", reflected)


for _name, _ufunc in (*_OPERATORS.items(), *_COMPARISONS.items()):
    _define(_name, _ufunc)


def fixed(value: Any) -> Any:
    """Return the array for which a `TracedArray` stands in, or the plain number of a traced one, and fix its numbers.

    Other values are returned as they are.
    """
    if type(value) is not TracedArray:
        return value
    pin_all(value.items.flat)
    return _plain(value.items)


def _plain(items: Any) -> Any:
    numpy = sys.modules["numpy"]
    return numpy.array([in_numpy(item) for item in items.flat]).reshape(items.shape)


def _are_equal(first: Any, second: Any) -> bool:
    numpy = sys.modules["numpy"]
    shapes = [each.shape if type(each) is TracedArray else numpy.shape(each) for each in (first, second)]
    return shapes[0] == shapes[1] and bool(numpy.all(numpy.equal(first, second)))


def _as_objects(value: Any) -> Any:
    """Return an array, a sequence of numbers of one type, or a number, as an array of objects; None for others."""
    numpy = sys.modules["numpy"]
    if type(value) is TracedArray:
        return value.items
    if is_number(value):
        return _objects(value)
    if isinstance(value, (tuple, list)):
        is_of_one_type = len({issubclass(type(item), float) for item in value}) == 1
        return _objects(value) if is_of_one_type and all(map(is_number, value)) else None
    if type(value) is numpy.ndarray and value.dtype in (numpy.int64, numpy.float64):
        return _objects(list(value.flat)).reshape(value.shape)
    return None


def _objects(value: Any) -> Any:
    """Return a number, or a sequence of them, as an array of objects."""
    numpy = sys.modules["numpy"]
    items = numpy.empty(len(value) if isinstance(value, (tuple, list)) else (), object)
    if items.ndim:
        items[:] = value
    else:
        items[()] = value
    return items


def _each(function: Callable[[Any], Any], items: Any) -> Any:
    found = sys.modules["numpy"].empty(items.shape, object)
    for index in sys.modules["numpy"].ndindex(items.shape):
        found[index] = function(items[index])
    return found


def _is_size(value: Any) -> bool:
    return type(value) is int or type(value) is TracedInt
