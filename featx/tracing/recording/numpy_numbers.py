"""Numbers of numpy that forward computes of sizes: `np.prod(x.shape)`, `np.ceil(height / 8) * 8`, `np.log2(n)`.

Numpy computes them, in the trace as in the graph, so that rounding, division by zero and integers that wrap round are
what they are in the model. That is done where all arguments are ints and floats. What numpy makes of other arguments
fixes the traced numbers among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from featx.ir.effects import MeasuredEffects
from featx.tracing.guards.scalars import TracedNumber, in_numpy, pin_all
from featx.tracing.objects.arrays import is_ufunc
from featx.tracing.objects.replaced_globals import original_of
from featx.tracing.source_uses.number_uses import is_used_as_number

if TYPE_CHECKING:
    from featx.ir.node import Node
    from featx.tracing.recording.recorder import Recorder

# What takes the value of a node, the node, and the arguments of its call, and returns a traced number.
_NewNumber = Callable[[int | float, "Node", tuple[Any, ...]], Any]


class NumpyNumbers:
    """What numpy computes of traced numbers.

    Args:
        recorder: makes nodes of it.
        new_number: makes a traced number of what a node gives.
    """

    def __init__(self, recorder: Recorder, new_number: _NewNumber) -> None:
        self._recorder = recorder
        self._new_number = new_number
        self._handling = _handling_of_errors()

    def apply(self, ufunc: Any, inputs: tuple[Any, ...]) -> Any:
        """Answer a universal function: `np.log2(n)`."""
        if is_ufunc(ufunc) and all(map(is_number, inputs)):
            return self.compute(ufunc, inputs)
        return ufunc(*map(self.fixed, inputs))

    def apply_operator(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Answer arithmetic on a number of numpy and another value. NotImplemented leaves it to a tensor."""
        if all(map(is_number, args)):
            return self.compute(function, args)
        if any(isinstance(arg, torch.Tensor) for arg in args):
            return NotImplemented
        return function(*map(self.fixed, args))

    def convert(self, number: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer `number.astype(dtype)`."""
        kind = kind_of_64_bits(dtype)
        if kind is None or args or kwargs:
            return self.fixed(number).astype(original_of(dtype), *args, **kwargs)
        return self.compute(kind, (number,))

    def reduce(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a function that makes one number of a sequence of ints: `np.prod(x.shape)`."""
        items: Any = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(items, (tuple, list)) or not all(map(_is_int, items)):
            return function(*args, **kwargs)
        if not any(isinstance(item, TracedNumber) for item in items):
            return function(items)
        return self.compute(function, (tuple(items),))

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], *, is_item: bool = False) -> Any:
        """Record a call whose arguments are numbers, or one tuple of them, and return what it gives.

        With `is_item` it is an item of an array that featx follows, and no code of the model has it.
        """
        numpy = sys.modules["numpy"]
        numbers = args[0] if type(args[0]) is tuple else args
        try:
            result = function(*(tuple(map(in_numpy, arg)) if type(arg) is tuple else in_numpy(arg) for arg in args))
        except Exception:  # the model may catch it, and goes another way then
            pin_all(numbers)
            raise
        kind = type(result)
        is_known = kind in (int, float, numpy.bool_, numpy.int64, numpy.float64)
        if not is_known or self._is_in_errstate() or (kind is numpy.int64 and not is_item and not self.may_be_int()):
            pin_all(numbers)
            return result
        recorder = self._recorder
        arguments = recorder.create_args(map(self._with_class, args))
        node = recorder.add_node("call_function", function, arguments, {}, None, None)
        node.meta["effects"] = MeasuredEffects()
        if kind is numpy.bool_:
            recorder.guards.add(node, bool(result), f"what numpy.{function.__name__} answers")
            return result
        is_of_numpy = issubclass(kind, numpy.number)
        number = self._new_number(result.item() if is_of_numpy else result, node, numbers)
        number.is_of_numpy = is_of_numpy
        return number

    def _with_class(self, arg: Any) -> Any:
        """Return the node of an int of numpy, which a graph holds as one of Python; other arguments as they are."""
        numpy = sys.modules["numpy"]
        if type(arg) is tuple:
            return tuple(map(self._with_class, arg))
        if type(arg) not in (numpy.int64, numpy.bool_):
            return arg
        return self._recorder.add_unnamed_node("call_function", type(arg), (arg.item(),), {})

    def _is_in_errstate(self) -> bool:
        """Say whether forward has told numpy what to do about a division by zero, as the graph would not."""
        return self._handling is not None and self._handling != _handling_of_errors()

    def fixed(self, number: Any) -> Any:
        """Return a traced number as the plain one of Python or numpy that the model has, and fix it."""
        pin_all((number,))
        return in_numpy(number)

    def may_be_int(self) -> bool:
        """Say whether a traced int may stand in for one of numpy in the code that runs."""
        frame = self._recorder.model_frame()
        return frame is not None and is_used_as_number(frame)


def _handling_of_errors() -> dict[str, str] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def kind_of_64_bits(dtype: Any) -> Any:
    """Return the class of numbers of numpy of a dtype, if it is int64 or float64; else None."""
    numpy = sys.modules["numpy"]
    kind = numpy.dtype(original_of(dtype)).type
    return kind if kind in (numpy.int64, numpy.float64) else None


def is_number(value: Any) -> bool:
    """Say whether a value is a bool, int or float of Python, one of 64 bits of numpy, or a traced number."""
    numpy = sys.modules["numpy"]
    plain = (bool, int, float, numpy.bool_, numpy.int64, numpy.float64)
    return isinstance(value, TracedNumber) or type(value) in plain


def _is_int(value: Any) -> bool:
    return type(value) is int or (isinstance(value, TracedNumber) and isinstance(value, int))
