"""Arrays of numpy that hold traced numbers: `np.array(x.shape) % 32`. Arithmetic on them is done on each number.

Only imported where numpy is loaded. Whatever else reads such an array fixes its numbers to their present values. C code
that reads the memory of the array itself finds there what it finds in the numbers: another value where they are
disguised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from featx.tracing.guards.scalars import TracedNumber, pin_all, pinned, plain_number, plain_numbers, shown_number
from featx.tree import tree_leaves, tree_map

# Universal functions that do with the items of arrays of objects what they do with arrays of int64 and float64.
_ARITHMETIC = frozenset(
    {"add", "subtract", "multiply", "floor_divide", "remainder", "divide", "negative", "positive", "absolute"}
)
_COMPARISONS = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})
# Those that round floats to floats: numpy asks each traced number for the result.
_ROUNDING = frozenset({"ceil", "floor", "trunc", "rint"})
_DIVISIONS = frozenset({"floor_divide", "remainder", "divide"})
# What `any` and `all` do.
_OF_TRUTH = frozenset({"logical_or", "logical_and"})
_KINDS = {"i": int, "f": float}
# Ints of more are not followed. Inputs that are a thousand times larger in each dimension give less than 2**63.
_MOST = 2**31
# What tells nothing of the items of an array; `view` gives a new array, and `any` and `all` call a universal function.
_OF_FORM = frozenset(
    {"shape", "ndim", "size", "dtype", "itemsize", "nbytes", "strides", "flags", "setflags", "view", "any", "all"}
)
_CONVERTING = (
    "__int__", "__float__", "__index__", "__complex__", "__bool__", "__array__", "__array_interface__", "__repr__",
    "__str__", "__format__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__",
)  # fmt: skip


class TracedArray(numpy.ndarray):
    """An array of int64 or float64 with the numbers that it holds.

    Attributes:
        numbers: an array of objects: the numbers of Python, some of which are traced; None where they are not known.
    """

    numbers: Any
    _before: bytes

    def __array_finalize__(self, obj: Any) -> None:
        """Know nothing of the numbers of a new array; fix those of an array of which C code has made it."""
        self.numbers = None
        if type(obj) is TracedArray:
            fixed(obj)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What code that asks for the class of an array is told."""
        return numpy.ndarray

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Follow arithmetic on the numbers, and fix them for whatever else numpy does."""
        followed = None
        if method == "__call__" and not kwargs:
            followed = _computed(ufunc, inputs)
        elif method == "reduce" and ufunc.__name__ in _OF_TRUTH and _numbers_of(self) is not None:
            inputs = (_as_plain(self != 0), *inputs[1:])
        if followed is not None:
            return followed
        return _as_plain(getattr(ufunc, method)(*map(fixed, inputs), **tree_map(fixed, kwargs)))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Ask whether any or all numbers are others than zero, and fix them for other functions of numpy."""
        if func in (numpy.any, numpy.all) and args and args[0] is self and _numbers_of(self) is not None:
            return func(_as_plain(self != 0), *args[1:], **kwargs)
        return func(*tree_map(fixed, args), **tree_map(fixed, kwargs))

    def __getitem__(self, key: Any) -> Any:
        """Return the array of some of the numbers, or one of them, which is fixed: it is a number of numpy."""
        key = tree_map(fixed, plain_numbers(key))
        numbers = _numbers_of(self)
        if numbers is None:
            return fixed(self)[key]
        item, found = _as_plain(self)[key], numbers[key]
        if isinstance(found, numpy.ndarray):
            return _with_numbers(item.view(TracedArray), found)
        if isinstance(found, TracedNumber):
            pinned(found)
        return item

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    def tolist(self) -> Any:
        """Return the numbers as those of Python."""
        numbers = _numbers_of(self)
        return fixed(self).tolist() if numbers is None else _each(_of_python, numbers).tolist()

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert the numbers, to `int` or `float`."""
        numbers = _numbers_of(self)
        kind = _KINDS.get(numpy.dtype(dtype).kind)
        if numbers is None or args or kwargs or kind is None or numpy.dtype(dtype) != numpy.dtype(kind):
            return fixed(self).astype(dtype, *args, **kwargs)
        return array_of(_each(lambda number: _converted(kind, number), numbers))

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy with the same numbers."""
        numbers = _numbers_of(self)
        return fixed(self).copy(*args, **kwargs) if numbers is None else array_of(numbers.copy())

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the same numbers in another shape."""
        numbers, shape = _numbers_of(self), plain_numbers(shape)
        if numbers is None:
            return fixed(self).reshape(*shape, **kwargs)
        array = _as_plain(self).reshape(*shape, **kwargs)
        return _with_numbers(array.view(TracedArray), numbers.reshape(*shape, **kwargs))


def _define_fixing(name: str) -> None:
    """Let a method or property of arrays that is not followed fix the numbers."""
    known: Any = getattr(numpy.ndarray, name)
    if callable(known):
        setattr(TracedArray, name, lambda self, *args, **kwargs: known(fixed(self), *args, **kwargs))
    else:
        setattr(TracedArray, name, property(lambda self: known.__get__(fixed(self)), known.__set__))


for _name in (*dir(numpy.ndarray), *_CONVERTING):
    if (_name[0] != "_" or _name in _CONVERTING) and _name not in {*vars(TracedArray), *_OF_FORM}:
        _define_fixing(_name)


def make_array(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer `numpy.array` and `numpy.asarray`: follow the numbers in a list or tuple, if they are of one type."""
    leaves = list(tree_leaves((args, kwargs)))
    if not any(isinstance(leaf, (TracedNumber, TracedArray)) for leaf in leaves):
        return function(*args, **kwargs)
    given, dtype = (*args, kwargs.get("dtype"), None)[:2]
    is_plain = len(args) + len(kwargs) == 1 + (dtype is not None)
    if is_plain and isinstance(given, TracedArray) and _numbers_of(given) is not None:
        array = given if function.__name__ == "asarray" else given.copy()
    else:
        array = _of_items(given) if is_plain and isinstance(given, (tuple, list)) else None
    if array is None:
        pin_all(leaves)
        return function(*tree_map(fixed, plain_numbers(args)), **tree_map(fixed, plain_numbers(kwargs)))
    return array if dtype is None else array.astype(dtype)


def _of_items(given: Any) -> Any:
    """Return an array of the numbers in a list or tuple; None where they are of several types."""
    leaves = list(tree_leaves(given))
    kinds = {kind for leaf in leaves for kind in (int, float, object) if _is_of(kind, leaf)}
    plain = numpy.array(plain_numbers(given)) if len(kinds) == 1 and object not in kinds else None
    if plain is None or plain.size != len(leaves):
        return None
    numbers = numpy.empty(len(leaves), object)
    for index, leaf in enumerate(leaves):
        numbers[index] = leaf
    return array_of(numbers.reshape(plain.shape))


def array_of(numbers: Any) -> Any:
    """Return an array of the numbers in an array of objects; a plain one if none is traced. O(size)."""
    kind = float if any(isinstance(number, float) for number in numbers.flat) else int
    return _with_numbers(_each(_shown, numbers).astype(kind).view(TracedArray), numbers)


def _with_numbers(array: TracedArray, numbers: Any) -> Any:
    if not any(isinstance(number, TracedNumber) for number in numbers.flat):
        return _as_plain(array)
    array.numbers, array._before = numbers, _as_plain(array).tobytes()
    return array


def _numbers_of(array: TracedArray) -> Any:
    """Return the numbers in an array; None where it was written, or where no trace follows them."""
    numbers = array.numbers
    if numbers is None or array._before != _as_plain(array).tobytes():
        return None
    is_recording = any(isinstance(number, TracedNumber) and number.trace.is_recording() for number in numbers.flat)
    return numbers if is_recording else None


def fixed(value: Any) -> Any:
    """Return an array as a plain one with the same memory, and fix its numbers; and anything else as it is."""
    if not isinstance(value, TracedArray):
        return value
    for number in () if value.numbers is None else value.numbers.flat:
        if isinstance(number, TracedNumber):
            pinned(number)
    return _as_plain(value)


def _as_plain(value: Any) -> Any:
    return value.view(numpy.ndarray) if isinstance(value, TracedArray) else value


def _computed(ufunc: Any, inputs: tuple[Any, ...]) -> Any:
    """Return what a universal function gives of arrays with traced numbers; None where it is not followed."""
    operands = list(map(_as_objects, inputs))
    if any(operand is None for operand in operands):
        return None
    if ufunc.__name__ in _ROUNDING:
        is_float = all(isinstance(number, float) for number in operands[0].flat)
        return array_of(_each(ufunc, operands[0])) if is_float else None
    if ufunc.__name__ in _DIVISIONS and any(plain_number(number) == 0 for number in operands[1].flat):
        return None  # numpy warns, and Python raises
    if ufunc.__name__ in _COMPARISONS:
        return numpy.asarray(ufunc(*operands), bool)
    if ufunc.__name__ not in _ARITHMETIC or not _stay_small(ufunc, operands):
        return None
    return array_of(numpy.asarray(ufunc(*operands), object))


def _stay_small(ufunc: Any, operands: list[Any]) -> bool:
    """Say whether ints are so small that the same is no larger than an int64 of numpy for inputs of any size.

    Numpy wraps round, and Python does not.
    """
    plain = [_each(plain_number, operand) for operand in operands]
    found = numpy.asarray(ufunc(*plain), object)
    return all(abs(item) < _MOST for each in (*plain, found) for item in each.flat if isinstance(item, int))


def _as_objects(value: Any) -> Any:
    """Return the numbers of an array, a list or one number as an array of objects; None for numbers of other types."""
    if isinstance(value, TracedArray):
        return _numbers_of(value)
    array: Any = value
    if not isinstance(value, numpy.ndarray):
        leaves = list(tree_leaves(value))
        if not all(_is_of(int, leaf) or _is_of(float, leaf) or type(leaf) is numpy.int64 for leaf in leaves):
            return None
        array = numpy.asarray(value, object)
    elif array.dtype not in (numpy.dtype(int), numpy.dtype(float)):
        return None
    return _each(lambda item: item if isinstance(item, TracedNumber) else _of_python(item), array.astype(object))


def _is_of(kind: type, value: Any) -> bool:
    """Say whether a value is a number of that type; with `object`, whether it is anything but an int or a float."""
    is_int = type(value) is int or (isinstance(value, TracedNumber) and isinstance(value, int))
    is_float = isinstance(value, float) and not is_int
    return {int: is_int, float: is_float}.get(kind, not (is_int or is_float))


def _each(function: Callable[[Any], Any], numbers: Any) -> Any:
    """Return an array of objects: what a function gives for each item."""
    found = numpy.empty(numbers.shape, object)
    for index in numpy.ndindex(numbers.shape):
        found[index] = function(numbers[index])
    return found


def _shown(number: Any) -> Any:
    return shown_number(number) if isinstance(number, TracedNumber) else number


def _of_python(number: Any) -> Any:
    """Return a number of numpy as one of Python."""
    if isinstance(number, TracedNumber):
        return _converted(float, number) if number.is_of_numpy else number
    return number.item() if isinstance(number, numpy.generic) else number


def _converted(kind: Any, number: Any) -> Any:
    return number.trace.call(kind, (number,), {}) if isinstance(number, TracedNumber) else kind(number)
