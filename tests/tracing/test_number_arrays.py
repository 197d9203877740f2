"""Arrays that numpy makes of sizes, `np.array(x.shape)`: arithmetic and checks are followed, other uses fix sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import featx

Function = Callable[[Tensor], Tensor]
EXAMPLE = (2, 16, 12, 3)
SHAPES = ((2, 16, 12, 3), (1, 16, 12, 3), (2, 20, 8, 3), (3, 24, 24, 3), (2, 17, 12, 3), (2, 1, 2, 3), (2, 40, 9, 3))


def asserts(x: Tensor) -> Tensor:
    assert (np.array(x.shape[1:3]) >= 2).all(), f"{x.shape} is too small"
    return x


def check_of_swin_unetr(x: Tensor) -> Tensor:
    # monai's SwinUNETR._check_input_size, with a patch of 2 and one stage
    remainder = (np.array(x.shape[1:3]) % np.power((2, 2), 2)) > 0
    if remainder.any():
        raise ValueError(f"dimensions {(np.where(remainder)[0] + 1).tolist()} are no multiples")
    return x


def pads(x: Tensor) -> Tensor:
    size = np.asarray(x.shape[1:3])
    rows, columns = (-size % 4).tolist()
    return pad(x, (0, 0, 0, columns, 0, rows))


def rounds(x: Tensor) -> Tensor:
    rows, columns = (np.ceil(np.array([x.shape[1], x.shape[2]]) / 8) * 8).astype(int).tolist()
    return pad(x, (0, 0, 0, columns - x.shape[2], 0, rows - x.shape[1]))


def raises_unless_even(x: Tensor) -> Tensor:
    if (np.array(x.shape[1:3]) % 2).any():
        raise ValueError("odd")
    return x


def written(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    sizes[1] = 16
    return x * sizes.tolist()[1]


def written_through_a_view(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    sizes[1:3][...] = (16, 12)
    return x * sizes.tolist()[1]


def written_in_place(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    sizes -= 1
    return x * sizes.tolist()[1]


def written_as_output(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    np.add(sizes, 1, out=sizes)
    return x * sizes.tolist()[2]


def as_key(x: Tensor) -> Tensor:
    return x * {16: 2.0, 20: 3.0}.get(int(np.array(x.shape)[1]), 4.0)


FOLLOWED: dict[str, Function] = {
    "an assertion": asserts,
    "monai's check": check_of_swin_unetr,
    "a remainder": raises_unless_even,
    "padding": pads,
    "rounded up": rounds,
    "any": lambda x: x * 2 if np.any(np.array(x.shape[1:3]) < 2) else x,
    "a sum of arrays": lambda x: x * (np.array(x.shape) + np.array((1, 2, 3, 4))).tolist()[2],
    "from the left": lambda x: x * (100 - 2 * np.array(x.shape)).tolist()[1],
    "two of them": lambda x: x * (np.array(x.shape[1:3]) * np.array(x.shape[2:4])).tolist()[0],
    "a ratio": lambda x: x * (np.array(x.shape) / 7).tolist()[1],
    "rows of sizes": lambda x: x * (np.array([x.shape[:2], x.shape[1:3]]) // 2).tolist()[1][0],
    "a dtype of Python": lambda x: x * np.array(x.shape, dtype=int).tolist()[1],
    "an array of an array": lambda x: x * np.asarray(np.array(x.shape), np.float64).tolist()[1],
    "a copy": lambda x: x * np.array(x.shape).copy().tolist()[1],
    "a part by a traced index": lambda x: x * np.array(x.shape)[x.dim() - 3 :].tolist()[0],
    "the class": lambda x: x * 2 if isinstance(np.array(x.shape), np.ndarray) else x,
}
READ: dict[str, Function] = {
    "written": written,
    "written through a view": written_through_a_view,
    "written in place": written_in_place,
    "written as output": written_as_output,
    "a key": as_key,
    "an item": lambda x: x * float(np.array(x.shape)[1]),
    "items": lambda x: x * float(sum(each for each in np.array(x.shape))),
    "a product": lambda x: x * float(np.array(x.shape[1:]).prod()),
    "the largest": lambda x: x * float(max(np.array(x.shape))),
    "a place": lambda x: x * float(np.array(x.shape).argmax()),
    "joined": lambda x: x * np.concatenate([np.array(x.shape), [1]]).tolist()[1],
    "a tensor": lambda x: x * torch.tensor(np.array(x.shape))[1],
    "memory": lambda x: x * torch.from_numpy(np.array(x.shape))[1],
    "another dtype": lambda x: x * float(np.array(x.shape).astype(np.int8)[1]),
    "wraps": lambda x: x * float((np.array(x.shape).astype(np.int8) * np.int8(20))[1]),
    "made of another dtype": lambda x: x * (np.array(x.shape, np.int8) * np.int8(20)).tolist()[1],
    "a decision about an array of another dtype": lambda x: (
        x * 2 if np.asarray(x.shape, dtype=np.float32).sum() == sum(SHAPES[3]) else x
    ),
    "a decision about an array of arrays": lambda x: (
        x * 2 if np.array([np.array(x.shape), np.array(x.shape)]).sum() == 2 * sum(SHAPES[3]) else x
    ),
    "beside floats": lambda x: x * np.array([x.shape[1], 0.5]).tolist()[0],
    "zero": lambda x: x * (np.array([7, 7]) // np.array([x.shape[1] - 16, 1])).tolist()[0],
    "wrapped round": lambda x: x * float((np.array(x.shape) * 10**18).tolist()[1] % 1000),
    "a product that is large": lambda x: x * float((np.array(x.shape) * 2**30 * 2**30).tolist()[1] % 1000),
    "a number alone": lambda x: x * float(np.array(x.shape[1])),
    "reshaped": lambda x: x * np.array(x.shape).reshape(2, 2).tolist()[0][1],
    "a decision about an item": lambda x: x * 2 if np.array(x.shape)[1] > 18 else x,
    "a decision about the sum": lambda x: x * 2 if np.array(x.shape).sum() > 36 else x,
    "a decision about one sum": lambda x: x * 2 if np.array(x.shape).sum() == sum(SHAPES[3]) else x,
    "the smaller": lambda x: x * np.minimum(np.array(x.shape), 18).tolist()[1],
    "text": lambda x: x * len(str(np.array(x.shape) * 50)),
    "bytes": lambda x: x * float(sum(np.array(x.shape).tobytes())),
    "equal arrays": lambda x: x * 2 if np.array_equal(np.array(x.shape), EXAMPLE) else x,
    "whether it is in it": lambda x: x * 2 if 16 in np.array(x.shape) else x,
}


class Uses(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.first, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


def extractor_of(model: nn.Module) -> featx.DualGraphModule:
    return featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(EXAMPLE), adaptive=False)


@pytest.mark.parametrize("name", FOLLOWED)
def test_arithmetic_and_checks_leave_sizes_free(name: str) -> None:
    model = Uses(FOLLOWED[name])
    extractor = extractor_of(model)
    decided = 0
    for shape in SHAPES:
        x = torch.rand(shape)
        try:
            expected = model(x)
        except (AssertionError, ValueError):
            with pytest.raises(featx.SpecializationError):
                extractor(x)
            continue
        if shape == (2, 1, 2, 3) and name == "any":  # the model goes another way
            with pytest.raises(featx.SpecializationError, match="lt 2"):
                extractor(x)
            continue
        decided += 1
        found = extractor(x)["output"]
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert decided > 3


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", READ)
def test_what_else_reads_them_is_right_or_refused(name: str) -> None:
    model = Uses(READ[name])
    extractor = extractor_of(model)
    refused = 0
    for shape in SHAPES:
        x = torch.rand(shape)
        try:
            found = extractor(x)["output"]
        except featx.SpecializationError:
            refused += 1
        else:
            assert torch.equal(found, model(x))
    assert refused < len(SHAPES)
