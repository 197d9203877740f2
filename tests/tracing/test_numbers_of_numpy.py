"""Functions of numpy that forward calls with sizes: those that give a number are followed, or fix what they read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import featx

Forward = Callable[[Tensor, int, int], Tensor]


def pad(x: Tensor, right: int, below: int) -> Tensor:
    return nn.functional.pad(x, (0, right, 0, below))


def flattened(x: Tensor) -> Tensor:
    features = np.prod(x.shape[1:])
    return x.reshape((x.shape[0], features))


def features_of(x: Tensor) -> int:
    return np.prod(x.shape[1:])  # pyright: ignore[reportReturnType]


def asks_for_class(x: Tensor) -> int:
    count = np.prod(x.shape[2:])
    return 2 if isinstance(count, int) else 3


def quiet(height: int) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.sqrt(height - 100.0)) if height > 99 else 1.0


def caught(height: int) -> float:
    with np.errstate(invalid="raise"):
        try:
            return float(np.sqrt(height - 61.0))
        except FloatingPointError:
            return 0.5


@functools.lru_cache(None)
def cached_root(height: int) -> float:
    return np.sqrt(height)


def annotated(x: Tensor) -> Tensor:
    features: int = np.prod(x.shape[1:])  # pyright: ignore[reportAssignmentType]
    return x.view(x.shape[0], features)


class Resizes:
    """Has a method that is called like one of tensors."""

    def resize(self, x: Tensor, size: int) -> Tensor:
        return x * 2 if isinstance(size, int) else x * 3


def closes_over(x: Tensor) -> int:
    count = np.prod(x.shape[2:])
    get = lambda: count  # noqa: E731 - a function that another one than the caller calls
    return 2 if isinstance(get(), int) else 3


class Windows:
    """Has a method and an operator that are called like those of tensors."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def view(self, size: object) -> Tensor:
        return self.x * 2 if isinstance(size, int) else self.x * 3

    __getitem__ = view


def block(x: Tensor, count: object) -> Tensor:
    return x * 2 if isinstance(count, int) else x * 3


def key_of_a_dict(x: Tensor) -> int:
    places: dict[Any, int] = {}
    places[np.prod(x.shape[2:])] = 1
    return 2 if isinstance(next(iter(places)), int) else 3


class Asks:
    def __rmul__(self, other: object) -> int:
        return 2 if isinstance(other, int) else 3


def multiplied_by_an_object(x: Tensor) -> int:
    asks = Asks()
    return np.prod(x.shape[2:]) * asks


def written_by(form: str, x: Tensor) -> int:
    return len(form % np.prod(x.shape[2:]))


FOLLOWED: dict[str, Forward] = {
    "cached": lambda x, h, w: x / cached_root(h),
    "plus a truth value": lambda x, h, w: x * (np.ceil(h / 8) + (h % 8 > 100)),
    "times a truth value": lambda x, h, w: x * (True * np.sqrt(h)),
    "index of a slice": lambda x, h, w: x.flatten(2)[..., : np.prod([h, 1])],
    "a method of what torch computes": lambda x, h, w: nn.functional.relu(x * 2).view(-1, np.prod([4, h, w])),
    "root of a product": lambda x, h, w: x / np.sqrt(np.prod(x.shape[1:])),
    "root of a product by math": lambda x, h, w: x / math.sqrt(np.prod(x.shape[1:])),
    "product, annotated": lambda x, h, w: annotated(x),
    "product, chosen": lambda x, h, w: x.view(-1, np.prod(x.shape[1:]) if x.dim() == 4 else 1),
    "padded to a multiple": lambda x, h, w: pad(x, int(np.ceil(w / 8) * 8 - w), int(np.ceil(h / 8) * 8 - h)),
    "floor": lambda x, h, w: pad(x, int(np.floor(w / 5)), int(np.floor(h / 3))),
    "trunc": lambda x, h, w: pad(x, int(np.trunc(w / 5)), int(np.trunc(h / 3))),
    "rint": lambda x, h, w: pad(x, int(np.rint(w / 4)), int(np.rint(h / 4))),
    "divided by a root": lambda x, h, w: x / np.sqrt(h * w),
    "logarithm": lambda x, h, w: pad(x, int(np.ceil(np.log2(w))), int(np.ceil(np.log2(h)))),
    "power": lambda x, h, w: x * np.power(h, -0.5),
    "maximum": lambda x, h, w: x * float(np.maximum(h, w)),
    "difference": lambda x, h, w: x * int(np.abs(h - w)),
    "product": lambda x, h, w: x.view(x.shape[0], np.prod(x.shape[1:])),
    "product, converted": lambda x, h, w: x.view(-1, int(np.prod(x.shape[1:]))),
    "product, in a name": lambda x, h, w: flattened(x),
    "product, of a helper": lambda x, h, w: x.view(x.shape[0], features_of(x)),
    "product, as a divisor": lambda x, h, w: x.sum((2, 3)) / np.prod(x.shape[2:]),
    "product that wraps round": lambda x, h, w: x * float(np.prod(x.shape) * 10**16 % 1000),
    "sum": lambda x, h, w: x * int(np.sum(x.shape)),
    "largest": lambda x, h, w: x * int(np.max([h, w])),
    "mean": lambda x, h, w: x * np.mean([h, w]),
    "item": lambda x, h, w: pad(x, int(np.ceil(w / 8).item()), int((np.ceil(h / 8) * 2).item())),
    "converted": lambda x, h, w: pad(x, int((np.ceil(w / 8) * 8).astype(np.int64) - w), 0),
    "divided by zero": lambda x, h, w: x * float(np.prod([h, w]) // np.abs(h - 61)),
    "a negative power": lambda x, h, w: x * float(np.sqrt(h) ** -2),
    "not a number": lambda x, h, w: x * 2 if np.isnan(np.sqrt(h - 1000.0)) else x,
    "times a number of numpy": lambda x, h, w: x * (np.float64(2.0) * h) / w,
    "times an int of numpy": lambda x, h, w: x * float(np.int64(2) ** 40 * w * np.int64(2) ** 20 % 1000),
    "times a ratio": lambda x, h, w: np.ceil(h / 8) / np.floor(w / 4) * x,
}
READ: dict[str, Forward] = {
    "an index of an object": lambda x, h, w: Windows(x)[np.prod([h, w])],
    "a slice of an object": lambda x, h, w: Windows(x)[: np.prod([h, w])],
    "an argument of a method of an object": lambda x, h, w: Windows(x).view(np.prod([h, w])),
    "an argument of a function that torch calls": lambda x, h, w: checkpoint(
        block, x, np.prod([h, w]), use_reentrant=False
    ),
    "a key of a dict": lambda x, h, w: x * key_of_a_dict(x),
    "an int times a truth value": lambda x, h, w: x * 2 if isinstance(np.prod([h, w]) * True, int) else x * 3,
    "an argument of a method called as one of tensors": lambda x, h, w: Resizes().resize(x, np.prod([h, w])),
    "an item of a set": lambda x, h, w: x * 2 if isinstance({np.prod([h, w])}.pop(), int) else x * 3,
    "a variable of a closure": lambda x, h, w: x * closes_over(x),
    "plus a list": lambda x, h, w: x * float((np.prod([h, w]) + [1, 2])[1]),
    "compared with a list": lambda x, h, w: x * float(np.sum(np.prod([h, w]) == [5, 3840]) + 1),
    "a float compared with a list": lambda x, h, w: x * float(np.sum(np.sqrt(w) == [8, 8]) + 1),
    "compared with more than a list": lambda x, h, w: x * float((np.prod([h, w]) > [5, 3840]).sum()),
    "times an object": lambda x, h, w: x * multiplied_by_an_object(x),
    "text by a name": lambda x, h, w: x * written_by("%r", x),
    "text of a float": lambda x, h, w: x * len(repr(np.sqrt(h))),
    "the type of a float": lambda x, h, w: x * 2 if type(np.sqrt(h)) is np.float64 else x * 3,
    "the opposite of a comparison": lambda x, h, w: x * 2 if ~(h > np.float64(10.0)) else x * 3,
    "a size of torch": lambda x, h, w: x * 2 if isinstance(torch.Size([np.prod([h, w])])[0], int) else x * 3,
    "an int, or not": lambda x, h, w: x * 2 if isinstance(np.prod(x.shape[2:]), int) else x * 3,
    "an int of arithmetic, or not": lambda x, h, w: x * 2 if isinstance(np.int64(2) * h, int) else x * 3,
    "an int, or not, in a name": lambda x, h, w: x * asks_for_class(x),
    "product along a dimension": lambda x, h, w: x * float(np.prod([[h, w], [2, 3]], axis=0)[1]),
    "product in another dtype": lambda x, h, w: x * float(np.prod([h, w], dtype=np.int8)),
    "product of a tensor's items": lambda x, h, w: x * float(np.prod([h, 0.5])),
    "number of 32 bits": lambda x, h, w: x * float(np.float32(0.1) * h),
    "two results": lambda x, h, w: x * float(np.divmod(h, 7)[1]),
    "settings of numpy": lambda x, h, w: x * quiet(h),
    "in a try": lambda x, h, w: x * caught(h),
    "a key": lambda x, h, w: x * {60: 2.0, 9: 3.0}.get(np.maximum(h, 2), 4.0),
    "times an array": lambda x, h, w: x * float((np.array([1.0, 2.0]) * h)[1]) / w,
    "clip": lambda x, h, w: x * float(np.clip(h / w, 0.5, 2.0)),
    "class": lambda x, h, w: x * 2 if isinstance(np.ceil(h / 8) * 2, np.floating) else x * 3,
    "opposite": lambda x, h, w: x * 2 if ~(np.ceil(h / 8) > 7) else x * 3,
    "opposite, of a size": lambda x, h, w: x * 2 if ~(h / 8 < np.ceil(h / 8)) else x * 3,
    "comparison": lambda x, h, w: x * 2 if np.ceil(h / 8) > np.floor(w / 8) else x * 3,
}
SHAPES = ((60, 64), (61, 64), (100, 36), (9, 200), (64, 64))


class Uses(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.conv, self.then = nn.Conv2d(3, 4, 3, padding=1), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.conv(x), x.shape[2], x.shape[3])


def extractor_of(model: nn.Module) -> featx.DualGraphModule:
    return featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(1, 3, 60, 64), adaptive=False)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("forward", FOLLOWED.values(), ids=FOLLOWED)
def test_numbers_that_numpy_computes_leave_sizes_free(forward: Forward) -> None:
    model = Uses(forward).eval()
    extractor = extractor_of(model)
    for shape in SHAPES:
        x = torch.rand(2, 3, *shape)
        torch.testing.assert_close(extractor(x)["output"], model(x), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:divide by zero")
@pytest.mark.parametrize("forward", READ.values(), ids=READ)
def test_what_else_numpy_reads_is_right_or_refused(forward: Forward) -> None:
    model = Uses(forward).eval()
    extractor = extractor_of(model)
    for shape in SHAPES:
        x = torch.rand(2, 3, *shape)
        try:
            found = extractor(x)["output"]
        except featx.SpecializationError:
            assert shape != (60, 64)
        else:
            torch.testing.assert_close(found, model(x), rtol=0, atol=0)


@pytest.mark.parametrize("value", [-4.0, float("nan"), float("inf")])
def test_a_number_for_which_numpy_gives_another_answer_than_python(value: float) -> None:
    class Rounds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with np.errstate(invalid="ignore"):
                return x * float(np.sqrt(x.max().item()))

    model, x = Rounds(), torch.full((2,), value)
    traced = featx.trace(model, x)
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0, equal_nan=True)


def test_the_root_of_a_negative_number_of_numpy_is_no_complex_one() -> None:
    model = Uses(lambda x, h, w: x * (np.floor(h / 8) - 100) ** 0.5).eval()
    with np.errstate(invalid="ignore"):
        extractor = extractor_of(model)
        for shape in SHAPES:
            x = torch.rand(2, 3, *shape)
            torch.testing.assert_close(extractor(x)["output"], model(x), rtol=0, atol=0, equal_nan=True)


class MakesTensors(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.tensor([float(np.sqrt(x.shape[-1]))] * 2),
        lambda x: torch.tensor(float(np.ceil(x.shape[-1] / 2))),
        lambda x: torch.tensor(float(x.shape[-1] * np.float64(0.5))),
        lambda x: torch.tensor(np.sqrt(x.shape[-1])),
        lambda x: torch.tensor(int(np.sqrt(x.shape[-1]))),
        lambda x: torch.tensor(np.int32(x.shape[-1])),
        lambda x: torch.as_tensor(np.int32(x.shape[-1])),
        lambda x: torch.tensor(np.float16(2.5)),
        lambda x: torch.as_tensor(np.uint8(3)) + x.long(),
        lambda x: torch.tensor(np.bool_(True)),
        lambda x: torch.tensor(np.int64(3)),
    ],
)
def test_tensors_of_numbers_of_numpy_have_the_dtype_of_the_model(compute: Callable[[Tensor], Tensor]) -> None:
    model, x = MakesTensors(compute), torch.rand(2, 4)
    for width in (4, 4, 9):
        example = torch.rand(2, width)
        found, expected = featx.trace(model, x if width == 4 else example)(example), model(example)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
