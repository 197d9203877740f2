"""The numbers that a model gets in a trace on an example, and what it does with them."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.ir.node import Node
from featx.tracing.guards.disguises import Disguise, disguise_as_larger
from featx.tracing.guards.scalars import (
    TracedInt,
    TracedNumber,
    pin_all,
    pinned,
    plain_number,
    plain_numbers,
    traced_number,
)
from featx.tracing.history.lineage import Origin, source_node
from featx.tracing.objects.arrays import is_array_constructor, is_of_given_items, is_reduction
from featx.tracing.recording.numpy_arrays import NumpyArrays
from featx.tracing.recording.numpy_numbers import NumpyNumbers
from featx.tracing.recording.size_arrays import SizeArrays
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.replica.size_caches import SizeCaches
from featx.tracing.signals import NeedsConversionTracking
from featx.tracing.source.frames import is_of_featx, user_of_number
from featx.tracing.source_uses.cache_lookups import (
    calls_cached_method,
    dicts_looked_up,
    dicts_looked_up_by_text,
    is_tuple_key,
    key_looked_up,
)
from featx.tracing.source_uses.conversions import CONVERSIONS, converts_by_calls_alone
from featx.tracing.source_uses.syntax_queries import is_comparison, is_in_try, writes_a_message
from featx.tree import tree_leaves

if TYPE_CHECKING:
    from featx.tracing.recording.recorder import Recorder

_DIVISIONS = frozenset({operator.truediv, operator.floordiv, operator.mod})
# Methods of tensors that return their values as numbers.
READS_NUMBERS = ("item", "tolist")
# As they are on import: a trace replaces them in `math`.
_OF_MATH = frozenset(value for value in vars(math).values() if isinstance(value, BuiltinFunctionType))


class Numbers:
    """The sizes and other numbers of one trace. Traced numbers record what is done with them here.

    Args:
        recorder: makes nodes of them.
        context: what is traced; knows what is followed in its files.
        size_caches: the dicts in which forward keeps things by sizes.

    Attributes:
        values: the numbers that the model got, in order.
        origins: the nodes that they come from.
        computed: those that it has computed from them, and the nodes of these.
        earlier: those of a finished trace, if this one is compared with it. C code sees the numbers that differ
            disguised.
        disguise: as what it sees them.
        disguised: the positions of further numbers that are disguised.
        shown_otherwise: the positions of numbers that C code has seen as larger ones and as zero in further runs,
            which did the same.
        sizes_were_read: whether Python has seen a size, so that it may have made something of it that no node shows.
        shapes_were_read: whether it has seen a whole shape, of which Python may count the dimensions unobserved.
        ties: for each call of `min` or `max` on sizes, whether several of them were the extreme.
        are_recorded: whether the trace runs still.
        next_call: those of the next call on the same replica.
        arrays: the arrays that numpy has made of them, and of which torch makes tensors.
        of_numpy: what numpy computes of them.
        of_numpy_arrays: the arrays that numpy makes of them, with which forward computes.
        uses_earlier: whether what forward does depends on a number that an earlier call has kept, other than on its
            comparison with a number of this call.
    """

    def __init__(self, recorder: Recorder, context: ModelContext, size_caches: SizeCaches) -> None:
        self._recorder = recorder
        self._context = context
        self._size_caches = size_caches
        self.values: list[int | float] = []
        self.origins: list[Origin] = []
        self.computed: list[tuple[int | float, Node]] = []
        self.earlier: Numbers | None = None
        self.disguise: Disguise = disguise_as_larger
        self.disguised: frozenset[int] = frozenset()
        self.shown_otherwise: frozenset[int] = frozenset()
        # By what a number was in the earlier trace: what such numbers are in this one, in order.
        self._values_by_earlier: dict[int | float, dict[int | float, int]] = {}
        self.sizes_were_read = False
        self.shapes_were_read = False
        self.ties: list[bool] = []
        self.are_recorded = True
        self.next_call: Numbers | None = None
        self.uses_earlier = False
        # Keys of caches that differ: by the ids of the origins of their numbers, with these.
        self._told_apart: dict[tuple[int, ...], list[Origin]] = {}
        self.arrays = SizeArrays(recorder)
        self.of_numpy = NumpyNumbers(recorder, self._new_computed)
        self.of_numpy_arrays = NumpyArrays(recorder, self.of_numpy)

    def mark(self) -> tuple[Any, ...]:
        """Return what `forget` needs to take back everything from now on."""
        return len(self.values), len(self.computed), len(self.ties), len(self._told_apart), self.arrays.mark()

    def forget(self, mark: tuple[Any, ...]) -> None:
        """Take back what was noted since `mark`. That sizes were read stays noted."""
        values, computed, ties, told_apart, arrays = mark
        self.arrays.forget(arrays)
        del self.values[values:], self.origins[values:], self.computed[computed:], self.ties[ties:]
        while len(self._told_apart) > told_apart:
            self._told_apart.popitem()

    def new(self, value: int | float, origin: Origin, *, is_disguised: bool = False) -> Any:
        """Return a number that the model gets, as one whose arithmetic is recorded.

        With `is_disguised` it is disguised although it may be what it was in the earlier trace.
        """
        number = self._new(value, origin, is_disguised)
        source = source_node(origin)
        number.is_of_values = source.op == "call_method" and source.target in READS_NUMBERS
        return number

    def _new(self, value: int | float, origin: Origin, is_disguised: bool) -> Any:
        position = len(self.values)
        self.values.append(value)
        self.origins.append(origin)
        known = [] if self.earlier is None else self.earlier.values
        was = known[position] if position < len(known) else None
        if is_disguised or position in self.disguised:
            return traced_number(value, origin, self, self._disguised_as_then(value, was))
        # In another dtype, what is made of a number is a constant that may differ, and has to be the true one.
        if self.earlier is None or self._recorder.stand_ins.is_cast or was == value:
            return traced_number(value, origin, self)
        return traced_number(value, origin, self, self._disguised(value, value if was is None else was))

    def _new_computed(self, result: int | float, node: Node, args: tuple[Any, ...]) -> Any:
        """Return what is computed from traced numbers, disguised where one of them is."""
        known = [] if self.earlier is None else self.earlier.computed
        was = known[len(self.computed)][0] if len(self.computed) < len(known) else None
        self.computed.append((result, node))
        disguised = self._disguised_as_then(result, was) if _holds_disguised(args) else None
        number = traced_number(result, node, self, disguised)
        number.is_of_values = any(isinstance(value, TracedNumber) and value.is_of_values for value in args)
        return number

    def _disguised_as_then(self, value: int | float, was: int | float | None) -> int | float:
        # A disguise knows the numbers of the earlier trace: some of those it shows as large ones and others as zero.
        return self.disguise(was if type(was) is type(value) else value)

    def _disguised(self, value: int | float, earlier: int | float) -> int | float:
        # Disguising the earlier value makes sure that the remainders differ from the earlier run. Numbers that were
        # equal then and differ now are shown as different ones: C code may compare height and width.
        values = self._values_by_earlier.setdefault(earlier, {})
        return self.disguise(earlier, values.setdefault(value, len(values)))

    def new_sizes(self, sizes: list[int], origins: list[Any]) -> list[Any]:
        """Return the shape of a tensor as traced numbers, and note that Python has seen all of it."""
        self.sizes_were_read = self.shapes_were_read = True
        return [self.new(plain_number(size), origin) for size, origin in zip(sizes, origins, strict=True)]

    # -- what traced numbers ask -------------------------------------------------------------------------------------

    def is_recording(self) -> bool:
        """Say whether what the running code does with numbers is recorded."""
        return self.are_recorded and not self._recorder.opaque_call.is_inside

    def node_of(self, origin: Origin) -> Node:
        """Return the node that an origin stands for."""
        return self._recorder.node_of(origin)

    def names_to_follow(self) -> list[tuple[dict[str, Any], str]]:
        """Return the names of conversions, with their globals, whose calls are to be followed."""
        return [(namespace, name) for namespace in self._context.converting for name in CONVERSIONS]

    def on_later_use(self, other: Any) -> None:
        """Take note that code uses a number, perhaps in the next call, alone or with another value."""
        later = self.next_call
        if later is None or not later.is_recording() or is_of_featx(user_of_number().f_code):
            return
        is_compared = isinstance(other, TracedNumber) and other.trace is later
        later.uses_earlier = later.uses_earlier or not is_compared

    def on_conversion(self) -> None:
        """Ask for another trace, which follows what the running code converts, where that can be.

        Raises:
            NeedsConversionTracking: it can.
        """
        frame = self._recorder.model_frame()
        if frame is None or any(frame.f_globals is known for known in self._context.converting):
            return
        if converts_by_calls_alone(frame.f_code.co_filename, frame.f_globals):
            raise NeedsConversionTracking(frame.f_globals)

    def is_message(self) -> bool:
        """Say whether the text that the running code makes only tells a person something."""
        frame = self._recorder.model_frame()
        return frame is None or writes_a_message(frame)

    def record_cache_key(self, number: Any) -> bool:
        """Record that code looks a key up in a cache of the model; say whether it hashes the number for that alone.

        Which keys of this call are equal decides what is found there. Python compares those whose hashes are equal;
        that the number differs from others is recorded here.
        """
        frame = user_of_number()
        if is_of_featx(frame.f_code):  # it looks at the caches
            return True
        looked_up = dicts_looked_up(frame)
        if not looked_up:
            return calls_cached_method(frame)
        if not self._size_caches.accept_as_caches(looked_up, has_tuples=is_tuple_key(frame)):
            return False
        key = key_looked_up(frame)
        key = key if type(key) is tuple else number
        # Going through an OrderedDict as such hashes its keys, which asks again.
        for other in itertools.chain.from_iterable(map(dict.__iter__, looked_up)):
            self._tell_apart(key, other)
        return True

    def _tell_apart(self, key: Any, other: Any) -> None:
        """Record that a key differs from an earlier one of this call, if it does."""
        if type(key) is not tuple and type(other) is tuple:  # a part of a tuple, it is not known where
            for item in cast(tuple[Any, ...], other):
                self._tell_apart(key, item)
            return
        items, others = list(tree_leaves(key)), list(tree_leaves(other))
        if len(items) != len(others) or any(map(_differ_always, items, others)):
            return
        pairs = [
            pair for pair in zip(items, others, strict=True) if any(isinstance(each, TracedNumber) for each in pair)
        ]
        numbers = list(filter(_is_traced, itertools.chain.from_iterable(pairs)))
        origins = tuple(id(each.origin) for each in numbers)
        is_of_this_call = all(each.trace is self for each in numbers)
        if (
            is_of_this_call
            and origins not in self._told_apart
            and any(plain_number(a) != plain_number(b) for a, b in pairs)
        ):
            self._told_apart[origins] = [each.origin for each in numbers]
            arguments = self._recorder.create_args(tuple(zip(*pairs, strict=True)))
            node = self._recorder.add_unnamed_node("call_function", operator.eq, arguments, {})
            self._recorder.guards.add(node, False, "whether two keys of a cache are equal")

    def note_text_in_cache_key(self, text: str) -> bool:
        """Note that `text`, made of the number, is a part of a cache's key; say whether it is made for that alone."""
        frame = self._recorder.model_frame()
        looked_up = [] if frame is None or self._context.fixes_keys else dicts_looked_up_by_text(frame)
        if not looked_up or not self._size_caches.accept_as_caches(looked_up):
            return False
        self._size_caches.note_text(looked_up, text)
        return True

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """Record arithmetic on traced numbers."""
        if not isinstance(result, (int, float)):
            return result
        self._guard_divisor(function, args)
        arguments = self._recorder.create_args(args)
        node = self._recorder.add_node("call_function", function, arguments, {}, None, None)
        number = self._new_computed(result, node, args)
        number.is_of_values = number.is_of_values and function is not int and function is not float
        return number

    def _guard_divisor(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if function in _DIVISIONS and isinstance(args[1], TracedNumber):
            frame = self._recorder.model_frame()
            if frame is not None and is_in_try(frame):  # which may go on where it is zero
                self.decide(operator.ne, (args[1], 0), True)

    def decide(self, function: Callable[..., Any], args: tuple[Any, ...], result: bool) -> None:
        """Record that Python saw a relation between numbers to hold, or not to."""
        recorder = self._recorder
        arguments = recorder.create_args(args)
        frame = recorder.model_frame()
        if frame is not None and is_comparison(frame):
            node = recorder.add_node("call_function", function, arguments, {}, None, frame)
        else:  # a dict, or the cache of a function, looks for a key: how often depends on what is in it
            node = recorder.add_unnamed_node("call_function", function, arguments, {})
        recorder.guards.add(node, result, f"{arguments[0]} {function.__name__} {arguments[1]}")

    # -- functions of Python that are called with them ---------------------------------------------------------------

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `range`, `min`, `int` or another function that would convert numbers in C; see `is_of_numbers`."""
        if is_array_constructor(function):
            return self.arrays.make(function, args, kwargs)
        if is_of_given_items(function):
            return self.of_numpy_arrays.make(function, args, kwargs)
        if is_reduction(function):
            return self.of_numpy.reduce(function, args, kwargs)
        if function is range:
            return self._range(args)
        if function is min or function is max:
            return self._extreme(function, args, kwargs)
        if function is int or function is float:
            return self._convert(function, args, kwargs)
        return self._math(function, args, kwargs)

    def _math(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        arguments, keywords = recorder.create_args(args), recorder.create_kwargs(kwargs)
        try:
            with recorder.opaque_call.unrecorded():
                result = function(*plain_numbers(args), **plain_numbers(kwargs))
        except (ArithmeticError, ValueError):  # the model may catch it, and goes another way then
            pin_all(tree_leaves((args, kwargs)))
            raise
        if not isinstance(result, (bool, int, float)):  # the two parts of a float
            pin_all(tree_leaves((args, kwargs)))
            return result
        if isinstance(result, bool):
            answer = recorder.add_unnamed_node("call_function", function, arguments, keywords)
            recorder.guards.add(answer, result, f"what math.{function.__name__} answers")
            return result
        node = recorder.add_node("call_function", function, arguments, keywords, None, None)
        self.sizes_were_read = True
        # The ratio of two sizes may be what it was, where both are others.
        return self.new(result, node, is_disguised=_holds_disguised(tree_leaves((args, kwargs))))

    def _convert(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = args[0] if args else None
        if isinstance(number, torch.Tensor) and len(args) == 1 and not kwargs:
            number = number.item()
        if kwargs or len(args) > 1 or not isinstance(number, TracedNumber):
            return kind(*args, **kwargs)
        if isinstance(number, kind) and not number.is_of_numpy and not number.is_of_values:
            return number
        return self.compute(kind, (number,), kind(plain_number(number)))

    def _extreme(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        items: Any = args if len(args) > 1 else next(iter(args))
        if kwargs or not isinstance(items, (tuple, list)):
            return function(*args, **kwargs)
        numbers = cast(tuple[Any, ...], tuple(items))
        if not all(type(item) is int or type(item) is TracedInt for item in numbers):
            return _extreme_of_mixed(function, numbers)
        if not self._record_tie(function, numbers):
            return function(numbers)
        # Which of `min(height, width)` it is says nothing where the example is a square.
        arguments = self._recorder.create_args(numbers)
        node = self._recorder.add_unnamed_node("call_function", function, arguments, {})
        return self._new_computed(function(plain_numbers(numbers)), node, numbers)

    def _record_tie(self, function: Callable[..., Any], numbers: tuple[Any, ...]) -> bool:
        """Note whether several of the numbers are the extreme; return that of the earlier trace where there is one."""
        position, plain = len(self.ties), plain_numbers(numbers)
        extreme = function(plain)
        extremes = [item for item, value in zip(numbers, plain, strict=True) if value == extreme]
        self.ties.append(len(extremes) > 1 and any(type(item) is TracedInt for item in extremes))
        known = [] if self.earlier is None else self.earlier.ties
        return known[position] if position < len(known) else self.ties[-1]

    def _range(self, args: tuple[Any, ...]) -> range:
        # How often a loop runs is part of the graph; for which sizes that holds is not fixed further.
        found = range(*plain_numbers(args))
        seen: set[int] = set()
        if len(args) > 1 and len(found) > 0:
            seen.add(0)  # where it starts
        if len(args) > 2 and len(found) > 1:
            seen.add(2)  # how far apart the numbers are
        bounds = [
            pinned(value) if index in seen and type(value) is TracedInt else value for index, value in enumerate(args)
        ]
        recorder = self._recorder
        node = recorder.add_unnamed_node("call_function", range, recorder.create_args(bounds), {})
        length = recorder.add_unnamed_node("call_function", len, (node,), {})
        recorder.guards.add(length, len(found), "how often a loop runs")
        return found


def _is_traced(value: object) -> bool:
    return isinstance(value, TracedNumber)


def _differ_always(item: Any, other: Any) -> bool:
    """Say whether two items of keys differ for all inputs: two constants, or a number and a text."""
    are_numbers = [isinstance(each, (int, float)) for each in (item, other)]
    if _is_traced(item) or _is_traced(other):
        return not all(are_numbers)
    are_plain = all(are_numbers) or (type(item) is str and type(other) is str)
    return are_plain and item != other


def _holds_disguised(values: Iterable[Any]) -> bool:
    return any(isinstance(value, TracedNumber) and value.is_disguised for value in values)


def is_of_numbers(function: Callable[..., Any]) -> bool:
    """Say whether a function is one that `Numbers.call` calls."""
    is_of_math = isinstance(function, BuiltinFunctionType) and function in _OF_MATH
    return (
        is_of_math
        or is_array_constructor(function)
        or is_reduction(function)
        or is_of_given_items(function)
        or any(function is each for each in (range, min, max, int, float))
    )


def _extreme_of_mixed(function: Callable[..., Any], items: tuple[Any, ...]) -> Any:
    # A float compares itself with an int in C: the comparison is turned round.
    if not any(type(item) is float for item in items):
        return function(items)
    best, *others = items
    for item in others:
        first, second = (item, best) if function is min else (best, item)
        if second > first if type(first) is float else first < second:
            best = item
    return best
