"""By how many pixels of an image two neighbours in a map are apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

# How much of an image convolutions without padding may lose at its edges, in all and where none has a stride.
_LOST_AT_EDGES, _LOST_WITHOUT_STRIDE = 0.2, 0.05
# By so many pixels, times the odd factors of the strides of the model, an image is made larger to measure strides.
_GROWTH = 256

# From how many pixels more the sides of the image have to the shape of a map then, if it is known.
ShapeOfLarger = Callable[[tuple[int, ...]], tuple[int, ...] | None]


class Strides:
    """The strides of the maps of a model.

    Args:
        modules: all of its modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)

    def of(self, layout: str, shape: tuple[int, ...], image: tuple[int, ...], shape_of_larger: ShapeOfLarger) -> Any:
        """Return the stride of a map as `stride_of`; where its sizes do not tell that, a larger image does.

        Args:
            layout: that of the map.
            shape: that of the map.
            image: the sides of the image.
            shape_of_larger: gives the shape of the map for a larger image.
        """
        found = stride_of(layout, shape, image, self._odd_factors)
        dims = [dim for dim, name in enumerate(layout) if name not in "NC"]
        places = [shape[dim] for dim in dims]
        if len(places) != len(image) or 0 in places or self._is_told(found, places, image):
            return found
        measured = self._measured(shape, dims, shape_of_larger)
        if any(isinstance(each, float) for each in measured):
            return None
        known = set(measured) - {None}
        common = known.pop() if len(known) == 1 else None
        own = found if isinstance(found, tuple) else (found,) * len(image)
        sides = zip(measured, own, places, image, strict=True)
        strides = tuple(each or _of_other_side(common, *rest) for each, *rest in sides)
        if measured.count(None) == len(image) or not all(map(_fits, strides, places, image)):
            return found
        return strides[0] if len(set(strides)) == 1 else strides

    def _is_told(self, found: Any, places: list[int], image: tuple[int, ...]) -> bool:
        """Say whether the sizes tell the stride: they are so many strides, and no layer loses places."""
        if self._loses_edges:
            return False
        if found is None:
            return True
        if isinstance(found, tuple) or (self._rounds_down and set(places) == {1}):
            return False
        is_exact = all(place * found == size for place, size in zip(places, image, strict=True))
        return is_exact and (set(places) == {1} or _odd_primes_of(int(found)) <= self._odd_factors)

    def _measured(self, shape: tuple[int, ...], dims: list[int], shape_of_larger: ShapeOfLarger) -> list[float | None]:
        """Return the stride along each dimension of an image that is larger on all sides, or else is wider alone.

        It is a float where no whole number is known to be the stride.

        The image grows by a multiple of the strides, so that it does not count what layers lose at the edges or round.
        A model of a fixed height, as for the bands of a spectrum, takes a wider image.
        """
        growth = _GROWTH * math.prod(self._odd_factors)
        for sides in ((growth,) * len(dims), (0,) * (len(dims) - 1) + (growth,)):
            there = shape_of_larger(sides)
            if there is not None and len(there) == len(shape):
                return [_stride_of_growth(growth, there[dim] - shape[dim]) for dim in dims]
        return [None] * len(dims)

    @functools.cached_property
    def _loses_edges(self) -> bool:
        """Whether convolutions or pools have no places for what is near the edges, so that maps are smaller."""
        return any(lost > stride for lost, stride in self._losses)

    @functools.cached_property
    def _rounds_down(self) -> bool:
        """Whether they leave out what is less than a stride at the edges: 63 pixels become 31 places."""
        return any(lost > 1 for lost, _ in self._losses)

    @functools.cached_property
    def _losses(self) -> list[tuple[int, int]]:
        """By how much a window is wider than the padding on both sides of it, and the stride of the windows."""
        return [each for module in self._modules for each in _losses(module)]

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


def _losses(module: nn.Module) -> list[tuple[int, int]]:
    names = ("kernel_size", "stride", "padding", "dilation")
    options: list[Any] = [module.__dict__.get(name, 1 if name == "dilation" else None) for name in names]
    if options[2] == "valid":
        options[2] = 0
    each_side = [each if isinstance(each, tuple) else (each,) for each in options]
    length = max(map(len, each_side))
    each_side = [each * length if len(each) == 1 else each for each in each_side]
    if not all(type(size) is int for sizes in each_side for size in sizes):
        return []
    sides = zip(*each_side, strict=True)
    return [(dilation * (kernel - 1) + 1 - 2 * padding, stride) for kernel, stride, padding, dilation in sides]


def _stride_of_growth(growth: int, more: int) -> float | None:
    """Return the stride with which an image that has grown by so many pixels has so many places more.

    Where the growth is no multiple of the stride, rounding makes less than one place more or less, however many layers
    round. If no whole number fits, as after a layer that scales by 1.5, or several do, the quotient is returned.
    """
    if not 0 < more <= growth:
        return None
    if growth % more == 0:
        return growth // more
    nearest = round(growth / more)
    fitting = [stride for stride in (nearest - 1, nearest, nearest + 1) if stride and abs(growth / stride - more) < 1]
    return fitting[0] if len(fitting) == 1 else growth / more


def _of_other_side(common: float | None, own: Any, place: int, size: int) -> Any:
    """Return the stride of a side along which none was measured: that of the others, unless its sizes tell its own."""
    is_told = common is None or (own is not None and own * place == size)
    return own if is_told or not _fits(common, place, size) else common


def _fits(stride: Any, place: int, size: int) -> bool:
    """Say whether a side has at most so many places of a stride."""
    return stride is not None and 0 < place <= -(-size // stride)


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
