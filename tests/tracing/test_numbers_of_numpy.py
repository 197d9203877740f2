"""Functions of numpy that forward calls with sizes: rounding and roots are followed, the rest fixes what it reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featx

Forward = Callable[[Tensor, int, int], Tensor]


def pad(x: Tensor, right: int, below: int) -> Tensor:
    return nn.functional.pad(x, (0, right, 0, below))


FOLLOWED: dict[str, Forward] = {
    "padded to a multiple": lambda x, h, w: pad(x, int(np.ceil(w / 8) * 8 - w), int(np.ceil(h / 8) * 8 - h)),
    "floor": lambda x, h, w: pad(x, int(np.floor(w / 5)), int(np.floor(h / 3))),
    "trunc": lambda x, h, w: pad(x, int(np.trunc(w / 5)), int(np.trunc(h / 3))),
    "rint": lambda x, h, w: pad(x, int(np.rint(w / 4)), int(np.rint(h / 4))),
    "divided by a root": lambda x, h, w: x / np.sqrt(h * w),
    "times a ratio": lambda x, h, w: np.ceil(h / 8) / np.floor(w / 4) * x,
}
READ: dict[str, Forward] = {
    "logarithm": lambda x, h, w: pad(x, int(np.ceil(np.log2(w))), int(np.ceil(np.log2(h)))),
    "item": lambda x, h, w: pad(x, int(np.ceil(w / 8).item()), int((np.ceil(h / 8) * 2).item())),
    "times an array": lambda x, h, w: x * float((np.array([1.0, 2.0]) * h)[1]) / w,
    "times a number of numpy": lambda x, h, w: x * (np.float64(2.0) * h) / w,
    "clip": lambda x, h, w: x * float(np.clip(h / w, 0.5, 2.0)),
    "maximum": lambda x, h, w: x * float(np.maximum(h, w)),
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


@pytest.mark.parametrize("forward", FOLLOWED.values(), ids=FOLLOWED)
def test_rounding_and_roots_leave_sizes_free(forward: Forward) -> None:
    model = Uses(forward).eval()
    extractor = extractor_of(model)
    for shape in SHAPES:
        x = torch.rand(2, 3, *shape)
        torch.testing.assert_close(extractor(x)["output"], model(x), rtol=0, atol=0)


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
