"""As what C code sees the numbers of a trace, in place of those with which the trace computes.

C code reads a number and tells nobody (`items[n]`, `0.5 * n`). Where it does something else for the other number, so
that the graph comes out otherwise, it has read it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

# Gets a number, and optionally its rank: numbers of other ranks are to be shown as different ones, if that can be.
Disguise = Callable[..., int | float]


def disguise_as_larger(number: int | float, rank: int = 0) -> int | float:
    """Disguise a number as one that is larger, by so little that loops over it end, and has another remainder.

    It is larger by four times the least common multiple of 1 to 10, and one; for each `rank` by one multiple more. So
    it is beyond most lengths at which code does something else.
    """
    return number + 10_081 + 2_520 * rank


def disguise_as_a_bit_larger(number: int | float, rank: int = 0) -> int | float:
    """Disguise a number as `disguise_as_larger` does, by less: what numpy makes of two of them takes some megabytes.

    It is larger by the least common multiple of 1 to 8, and one; for each `rank` by one multiple more.
    """
    return number + 841 + 840 * rank


def disguise_as_one(number: int | float, rank: int = 0) -> int | float:
    """Disguise a number as one."""
    return type(number)(1)


def disguise_as_zero(number: int | float, rank: int = 0) -> int | float:
    """Disguise a number as zero."""
    return type(number)(0)


@dataclass(frozen=True)
class _InReverse:
    """Disguises some ints as larger ones, and the others as zero.

    Attributes:
        is_large: whether an int is one of the larger ones.
        of_float: as what a float is disguised.
    """

    is_large: Callable[[int], bool]
    of_float: Callable[[float], float]
    __name__ = "disguise_in_reverse"

    def __call__(self, number: int | float, rank: int = 0) -> int | float:
        """Return as what a number is shown."""
        if isinstance(number, float):
            return self.of_float(number)
        return disguise_as_larger(number) if self.is_large(number) else 0


class _Turn:
    """Tells which one of equal numbers comes now, where all of them come in the same order again and again."""

    def __init__(self, numbers: Iterable[int | float]) -> None:
        self._counts = Counter(numbers)
        self._seen: Counter[int | float] = Counter()

    def of(self, number: int | float, *, from_the_end: bool) -> int:
        count = max(self._counts[number], 1)
        place = self._seen[number] % count
        self._seen[number] += 1
        return count - 1 - place if from_the_end else place


# Bounds of a list or of layers are small numbers; of more numbers the larger ones are not told apart.
_MOST_BOUNDS = 16


def disguises_in_reverse(numbers: list[int | float]) -> list[Disguise]:
    """Return disguises with which C code takes something between two numbers, where it takes nothing as they are.

    Of the bounds in `layers[3:1]`, the first one is zero then, and the second one large, with one of the disguises;
    of equal ones too. Floats come in the reverse order, and are nan and infinite. For two ints one disguise, for 16 or
    more four; two where two are equal, and up to eight where more are; at least three for floats.
    """
    ints = sorted({number for number in numbers if isinstance(number, int)})
    has_floats = any(isinstance(number, float) for number in numbers)
    # The larger number has the smaller rank, so that there is a bit of which it has 0 and the other one 1.
    ranks = {number: rank for rank, number in enumerate(reversed(ints[:_MOST_BOUNDS]))}
    of_floats: tuple[Callable[[float], float], ...] = (operator.neg, lambda number: math.nan, lambda number: math.inf)
    count = max((len(ranks) - 1).bit_length() if ranks else 0, len(of_floats) if has_floats else 0)
    found: list[Disguise] = [
        _InReverse(lambda number, bit=bit: bool(ranks.get(number, 0) >> bit & 1), of_floats[bit % len(of_floats)])
        for bit in range(count)
    ]
    counts = Counter(numbers)
    # Those that have no equal are large: zero could hide what is made of the others, as a factor does.
    alone = {number for number, count in counts.items() if count == 1}
    bits = (min(max(counts.values(), default=1), _MOST_BOUNDS) - 1).bit_length()
    for from_the_end, bit in itertools.product((False, True), range(bits)):
        turn = partial(_Turn(numbers).of, from_the_end=from_the_end)
        found.append(
            _InReverse(
                lambda number, turn=turn, bit=bit: number in alone or bool(turn(number) >> bit & 1),
                lambda number, turn=turn: turn(number) - number,
            )
        )
    return found
