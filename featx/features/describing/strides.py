"""By how many pixels of an image two neighbours in a map are apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

# How much of an image convolutions without padding may lose at its edges, in all and where none has a stride.
_LOST_AT_EDGES, _LOST_WITHOUT_STRIDE = 0.2, 0.05


class Strides:
    """The strides of the maps of a model.

    Args:
        modules: all of its modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)

    def of(
        self,
        layout: str,
        shape: tuple[int, ...],
        image: tuple[int, ...],
        shape_of_wider: Callable[[], tuple[int, ...] | None],
    ) -> Any:
        """Return the stride of a map as `stride_of`; where the model loses places at the edges, a wider image tells.

        Args:
            layout: that of the map.
            shape: that of the map.
            image: the sides of the image.
            shape_of_wider: gives the shape of the map for an image of twice the width, if it is known.
        """
        found = stride_of(layout, shape, image, self._odd_factors)
        places = tuple(size for size, name in zip(shape, layout, strict=True) if name not in "NC")
        is_told = isinstance(found, tuple) or not (self._loses_edges or found is None)
        if is_told or len(places) != len(image) or "W" not in layout:
            return found
        there = shape_of_wider()
        if there is None or len(there) != len(shape):
            return found
        at = layout.index("W")
        plausible = found if isinstance(found, int) and _odd_primes_of(found) <= self._odd_factors else None
        measured = _stride_of_growth(image[-1], there[at] - shape[at], plausible)
        fits = measured is not None and all(
            0 < place <= -(-size // measured) for size, place in zip(image, places, strict=True)
        )
        return measured if fits else found

    @functools.cached_property
    def _loses_edges(self) -> bool:
        """Whether convolutions or pools have no places for what is near the edges, so that maps are smaller."""
        return any(map(_loses_edges, self._modules))

    @functools.cached_property
    def _odd_factors(self) -> frozenset[int]:
        """The odd primes in the strides of the model's convolutions and pools: 7 for patches of 14 pixels."""
        strides: set[int] = set()
        for module in self._modules:
            stride: Any = module.__dict__.get("stride")
            strides.update(each for each in (stride if isinstance(stride, tuple) else (stride,)) if type(each) is int)
        return frozenset(prime for stride in strides for prime in _odd_primes_of(stride))


def _is_even(places: tuple[int, ...], image: tuple[int, ...]) -> bool:
    """Say whether one stride, up to rounding, makes all of these places of the image."""
    if 0 in places or len(places) != len(image):
        return False
    pairs = list(zip(image, places, strict=True))
    least = max(size / (place + 1) for size, place in pairs)
    most = min(size / (place - 1) if place > 1 else math.inf for size, place in pairs)
    return least < most


def is_map(layout: str, shape: tuple[int, ...], image: tuple[int, ...]) -> bool:
    """Say whether the places of a layout are places of the image: those of heads and tokens are not."""
    places = tuple(size for size, name in zip(shape, layout, strict=True) if name not in "NC")
    return _is_even(places, image) and stride_of(layout, shape, image) is not None


def stride_of(
    layout: str, shape: tuple[int, ...], image: tuple[int, ...], odd_factors: frozenset[int] | None = None
) -> Any:
    """Return the stride with which the places of a value are those of an image, or one for each side; None if none."""
    places = [size for size, name in zip(shape, layout, strict=True) if name not in "NC"]
    if not places or 0 in places or len(places) != len(image):
        return None
    strides = [_ratio(size, place, odd_factors) for size, place in zip(image, places, strict=True)]
    if None in strides:
        return None
    return strides[0] if len(set(strides)) == 1 else tuple(strides)


def _ratio(size: int, place: int, odd_factors: frozenset[int] | None) -> float | None:
    """Return the stride that makes `place` of `size`: their ratio, or a power of two that is near.

    Layers of stride 2 round up: 75 pixels become 5 at a stride of 16. Convolutions without padding lose places at the
    edges. There is none where so many places are none of the image, as the 197 tokens on both sides of an attention.

    Args:
        size: a side of the image.
        place: a side of the map.
        odd_factors: the odd primes that strides of the model have; None if that is not known.
    """
    ratio = size / place
    if ratio.is_integer() and (place == 1 or odd_factors is None or _odd_primes_of(int(ratio)) <= odd_factors):
        return int(ratio)
    least = 2 ** math.floor(math.log2(max(ratio, 1)))
    rounded = next((each for each in (least, 2 * least) if each > 1 and -(-size // each) == place), None)
    if rounded is not None:
        return rounded
    power = 2.0 ** round(math.log2(ratio))
    lost = _LOST_AT_EDGES if power > 1 else _LOST_WITHOUT_STRIDE if power == 1 else 1e-9
    if abs(ratio / power - 1) < lost:
        return int(power) if power >= 1 else power
    return round(ratio) if ratio > 2 else None


def _loses_edges(module: nn.Module) -> bool:
    options: list[Any] = [module.__dict__.get(name) for name in ("kernel_size", "stride", "padding")]
    kernel, stride, padding = (each if isinstance(each, tuple) else (each,) for each in options)
    is_known = all(type(size) is int for size in (*kernel, *stride, *padding))
    return is_known and max(padding) == 0 and max(kernel) > min(stride)


def _stride_of_growth(width: int, more: int, found: int | None) -> int | None:
    """Return the stride with which an image of twice the width has so many places more.

    What is lost at the edges does not count. Rounding may have made one place more, or less: what was `found` is kept
    where it may be that.
    """
    if not 0 < more <= width:
        return None
    if found is not None and more - 1 < width / found < more + 1:
        return found
    power = 2 ** round(math.log2(width / more))
    if width % more and more - 1 < width / power < more + 1:
        return power
    return None if width % more else width // more


def _odd_primes_of(number: int) -> set[int]:
    found: set[int] = set()
    divisor = 3
    number //= (number & -number) or 1
    while number > 1:
        if number % divisor == 0:
            found.add(divisor)
            number //= divisor
        else:
            divisor += 2
    return found
