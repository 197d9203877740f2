"""Traced numbers: ints and floats that the model got from traced tensors, and that record the arithmetic done on them.

They pass wherever Python or torch take a number. A comparison answers for the example and records a guard. A
conversion that loses the record (`float(n)`, `int(f)`, where it is not followed by its name) pins the number to its
present value. Outside of the trace that made them, and inside modules that are kept whole, traced numbers are plain
numbers.

C code reads them and says nothing (`items[n]`, `0.5 * n`, `[0] * n`). A disguised number shows it another value than
the one with which all of the above is done, so that what was read that way comes out otherwise.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.tracing.objects.arrays import is_scalar_of_numpy
from featx.tracing.signals import Diverged
from featx.tracing.source.frames import is_of_python, user_of_number

if TYPE_CHECKING:
    from featx.ir.node import Node

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor")
_COMPARISONS = ("eq", "ne", "lt", "gt", "le", "ge")
_UNARY = ("neg", "pos", "abs", "invert")
_TEXT = ("__str__", "__repr__", "__format__")
# What answers about the value in a way that no arithmetic can follow.
_PINNING = ("bit_length", "bit_count", "as_integer_ratio", "to_bytes", "hex", "conjugate")
_ROUNDING: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("ceil", math.ceil), ("floor", math.floor), ("trunc", math.trunc), ("round", round),
)  # fmt: skip
_HOLD_NO_NUMBERS = frozenset(
    {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device}
)


class _NoTrace:
    """Stands for the trace of a number that belongs to none: code has made it by calling the class of a traced one."""

    def is_recording(self) -> bool:
        return False

    def on_later_use(self, other: Any) -> None:
        pass


class TracedNumber:
    """What traced ints and floats share."""

    trace: Any = _NoTrace()  # the `Numbers` of a trace, see `recording/numbers.py`
    origin: Any = None  # whatever the trace knows values by
    value: Any = None  # the number itself, where C code may see another one
    is_disguised = False
    is_of_numpy = False  # whether it stands for a number of numpy, which has further methods
    is_of_values = False  # whether it was read from a tensor, whose dtype says whether it is an int or a float

    @property
    def node(self) -> Node:
        """The node of this number, made at its first use."""
        return self.trace.node_of(self.origin)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__mro__[2], (pinned(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()

    def __copy__(self) -> Any:
        return self if self.trace.is_recording() else _plain(self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Answer a universal function of numpy: `np.sqrt(n)` is followed, and one with an array pins numbers."""
        if method == "__call__" and not kwargs and self.trace.is_recording():
            return self.trace.of_numpy.apply(ufunc, inputs)
        return getattr(ufunc, method)(*map(pinned_number, inputs), **kwargs)

    def __getattr__(self, name: str) -> Any:
        if self.is_of_numpy and not name.startswith("__"):  # torch asks each argument for `__torch_function__`
            if name == "item":
                return lambda: self.trace.call(_kind_of(self), (self,), {})
            if name == "astype":
                return partial(self.trace.of_numpy.convert, self)
            known = _numpy_kind_of(self)
            if hasattr(known, name):
                return getattr(known(pinned(self)), name)
        kind = _kind_of(self).__name__
        raise AttributeError(f"'{kind}' object has no attribute '{name}'", name=name, obj=self)


class TracedInt(TracedNumber, int):
    """An int of a trace."""

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What code that asks for the class of a number is told: `n.__class__ is int`."""
        return _numpy_kind_of(self) if self.is_of_numpy else int

    def __int__(self) -> int:
        return _converted(self)

    def __float__(self) -> float:
        return float(_converted(self))

    def __bool__(self) -> bool:
        return _is_not_zero(self)


class TracedFloat(TracedNumber, float):
    """A float of a trace."""

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What code that asks for the class of a number is told."""
        return _numpy_kind_of(self) if self.is_of_numpy else float

    def is_integer(self) -> bool:
        """Say whether the number has no fraction, and record what the remainder was seen to be."""
        return self % 1 == 0

    def __int__(self) -> int:
        return int(_converted(self))

    def __float__(self) -> float:
        return _converted(self)

    def __bool__(self) -> bool:
        return _is_not_zero(self)


def traced_number(value: int | float, origin: Any, trace: Any, shown: int | float | None = None) -> Any:
    """Return `value` as a number that `trace` follows; with `shown`, that is what C code sees."""
    kind, plain = (TracedFloat, float) if isinstance(value, float) else (TracedInt, int)
    number: Any = kind(value if shown is None else shown)
    number.trace, number.origin, number.is_disguised = trace, origin, shown is not None
    number.value = value if type(value) in (plain, kind) else plain(value)  # a number of numpy
    return number


def plain_number(value: Any) -> Any:
    """Return a traced number as a plain one, and anything else as it is."""
    return _plain(value) if isinstance(value, TracedNumber) else value


def plain_numbers(value: Any) -> Any:
    """Return `value` with the traced numbers in tuples, lists, dicts and slices as plain ones; itself without any."""
    kind = type(value)
    if kind in (tuple, list, torch.Size):
        if _HOLD_NO_NUMBERS.issuperset(map(type, value)):
            return value
        items = [plain_numbers(item) for item in value]
        return value if all(map(operator.is_, items, value)) else kind(items)
    if kind is dict:
        values = {key: plain_numbers(item) for key, item in value.items()}
        return value if all(map(operator.is_, values.values(), value.values())) else values
    if kind is slice:
        return slice(plain_numbers(value.start), plain_numbers(value.stop), plain_numbers(value.step))
    return plain_number(value)


def _plain(number: Any) -> Any:
    return shown_number(number) if number.value is None else number.value


def shown_number(number: Any) -> Any:
    """Return a traced number as the plain one that C code sees."""
    # Through the slots of the base class: int(number) would ask __int__, which pins.
    return int.__add__(number, 0) if isinstance(number, int) else float.__mul__(number, 1.0)


def pinned(number: Any) -> Any:
    """Return a traced number as a plain one, and record that it must be the same again."""
    if number.trace.is_recording():
        if number.is_disguised:
            raise Diverged  # it would have to be what it was before, and is not
        plain = _plain(number)
        if plain == plain:
            number.trace.decide(operator.eq, (number, plain), True)
        else:  # nan
            number.trace.decide(operator.ne, (number, number), True)
    else:
        number.trace.on_later_use(None)
    return _plain(number)


def pin_all(values: Iterable[Any]) -> None:
    """Record of each traced number among `values` that it must be the same again."""
    for value in values:
        if isinstance(value, TracedNumber):
            pinned(value)


def pinned_number(value: Any) -> Any:
    """Return a traced number as `pinned` does, and anything else as it is."""
    return pinned(value) if isinstance(value, TracedNumber) else value


def in_numpy(value: Any) -> Any:
    """Return a traced number as the plain one, of Python or of numpy, that the model has; anything else as it is."""
    if not isinstance(value, TracedNumber):
        return value
    return _numpy_kind_of(value)(_plain(value)) if value.is_of_numpy else _plain(value)


def _is_of_numpy(value: Any) -> bool:
    return value.is_of_numpy if isinstance(value, TracedNumber) else is_scalar_of_numpy(value)


def _kind_of(number: TracedNumber) -> type:
    return int if issubclass(type(number), int) else float  # isinstance() would ask for `__class__`


def _numpy_kind_of(number: TracedNumber) -> Any:
    numpy = sys.modules["numpy"]
    return numpy.int64 if _kind_of(number) is int else numpy.float64


def _is_not_zero(number: Any) -> bool:
    plain = _plain(number)
    if number.trace.is_recording():
        number.trace.decide(operator.ne, (number, 0), plain != 0)
    else:
        number.trace.on_later_use(None)
    return plain != 0


def _converted(number: Any) -> Any:
    if number.trace.is_recording():
        number.trace.on_conversion()
    return pinned(number)


def _define(kind: type, name: str, function: Callable[..., Any], *, reflected: bool = False) -> None:
    method = f"__{'r' if reflected else ''}{name.strip('_')}__"
    base: Callable[..., Any] | None = getattr(kind.__mro__[2], method, None)
    if base is None:
        return
    known = base

    def implementation(self: Any, *values: Any) -> Any:
        others = list(values)
        if len(others) > 1:  # pow(n, 2, 7)
            return known(pinned(self), *map(plain_number, others))
        if self.trace.is_recording() and any(map(_is_of_numpy, (self, *others))):
            return self.trace.of_numpy.apply_operator(function, (*others, self) if reflected else (self, *others))
        try:
            result = known(_plain(self), *map(plain_number, others))
        except ArithmeticError:  # the model may catch it, and goes another way then
            pin_all((self, *others))
            raise
        if result is NotImplemented and isinstance(others[0], float):
            # int leaves this to float, which would take the plain value.
            of_float: Callable[..., Any] | None = getattr(float, method, None)
            result = of_float(float(_plain(self)), plain_number(others[0])) if of_float else NotImplemented
        if not self.trace.is_recording():
            self.trace.on_later_use(None)
            return result
        if result is NotImplemented:
            return result
        return self.trace.compute(function, (*others, self) if reflected else (self, *others), result)

    setattr(kind, method, implementation)


def _define_comparison(kind: type, name: str) -> None:
    known = cast(Callable[..., Any], getattr(kind.__mro__[2], f"__{name}__"))
    function = getattr(operator, name)

    def implementation(self: Any, other: Any) -> Any:
        if self.is_of_numpy and self.trace.is_recording() and isinstance(other, (tuple, list)):
            return function(self.trace.of_numpy.fixed(self), other)  # numpy makes an array of it
        result = known(_plain(self), plain_number(other))
        if result is NotImplemented and isinstance(other, float):
            result = getattr(float, f"__{name}__")(float(_plain(self)), plain_number(other))
        if not self.trace.is_recording():
            self.trace.on_later_use(other)
        elif result is not NotImplemented and is_of_python(user_of_number().f_code):
            pin_all((self, other))  # `random.sample` draws until it has so many: with a false number for ever
        elif result is not NotImplemented:
            self.trace.decide(function, (self, other), result)
            if _is_of_numpy(self) or _is_of_numpy(other):
                return sys.modules["numpy"].bool_(result)  # of which `~` is the opposite
        return result

    setattr(kind, f"__{name}__", implementation)


def _define_pinning(kind: type, name: str) -> None:
    known: Callable[..., Any] | None = getattr(kind.__mro__[2], name, None)
    if known is not None:
        setattr(kind, name, lambda self, *args, **kwargs: known(pinned(self), *args, **kwargs))


def _define_text(kind: type, name: str) -> None:
    known = cast(Callable[..., str], getattr(kind.__mro__[2], name))

    def implementation(self: Any, *args: Any) -> str:
        text = getattr(in_numpy(self), name)(*args) if self.is_of_numpy else known(_plain(self), *args)
        if not self.trace.is_recording() or not (self.trace.is_message() or self.trace.note_text_in_cache_key(text)):
            pinned(self)
        return text

    setattr(kind, name, implementation)


def _hash(self: Any) -> int:
    # A key of a dict: what is found there depends on the value, unless the code has put it there itself.
    is_of_cache = self.trace.is_recording() and self.trace.record_cache_key(self)
    return hash(_plain(self) if is_of_cache else pinned(self))


def _divmod(self: Any, other: Any) -> Any:
    return self // other, self % other


def _rdivmod(self: Any, other: Any) -> Any:
    return other // self, other % self


for _kind in (TracedInt, TracedFloat):
    setattr(_kind, "__divmod__", _divmod)  # noqa: B010 - beside its siblings
    setattr(_kind, "__rdivmod__", _rdivmod)  # noqa: B010
    for _name in _TEXT:
        _define_text(_kind, _name)
    for _name in _PINNING:
        _define_pinning(_kind, _name)
    for _name in _ARITHMETIC:
        _define(_kind, _name, getattr(operator, _name))
        _define(_kind, _name, getattr(operator, _name), reflected=True)
    for _name in _UNARY:
        _define(_kind, _name, getattr(operator, _name))
    for _name, _function in _ROUNDING:
        _define(_kind, _name, _function)
    for _name in _COMPARISONS:
        _define_comparison(_kind, _name)
    _kind.__hash__ = _hash
