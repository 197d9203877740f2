"""Arrays that numpy makes of sizes, `np.array(x.shape)`: computing with them is followed, other uses fix sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import BehindALayer
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

import featx

Function = Callable[[Tensor], Tensor]
EXAMPLE = (2, 16, 12, 3)
SHAPES = (EXAMPLE, (1, 16, 12, 3), (2, 20, 8, 3), (3, 24, 24, 3), (2, 17, 12, 3), (2, 1, 2, 3), (2, 40, 9, 3))


def asserts(x: Tensor) -> Tensor:
    if not (np.array(x.shape[1:3]) >= 2).all():  # pytest rewrites what `assert` does
        raise AssertionError(f"{x.shape} is too small")
    return x


def check_of_swin_unetr(x: Tensor) -> Tensor:
    # monai's SwinUNETR._check_input_size, with a patch of 2 and one stage
    sizes = np.array(x.shape[1:3])
    remainder = (sizes % np.power((2, 2), 2)) > 0
    if remainder.any():
        raise ValueError(f"dimensions {(np.where(remainder)[0] + 1).tolist()} of {sizes} are no multiples")
    return x


def raises_unless_even(x: Tensor) -> Tensor:
    if (np.array(x.shape[1:3]) % 2).any():
        raise ValueError("odd")
    return x


def pads(x: Tensor) -> Tensor:
    size = np.asarray(x.shape[1:3])
    rows, columns = (-size % 4).tolist()
    return pad(x, (0, 0, 0, columns, 0, rows))


def pads_by_items(x: Tensor) -> Tensor:
    rows, columns = -np.array(x.shape[1:3]) % 4
    return pad(x, (0, 0, 0, int(columns), 0, int(rows)))


def rounds(x: Tensor) -> Tensor:
    rows, columns = (np.ceil(np.array([x.shape[1], x.shape[2]]) / 8) * 8).astype(np.int64).tolist()
    return pad(x, (0, 0, 0, columns - x.shape[2], 0, rows - x.shape[1]))


def doubled_size(x: Tensor) -> Tensor:
    return interpolate(x[None], size=tuple(np.array(x.shape[1:4]) * 2))[0]


def half(sizes: Any) -> Any:
    return np.array(sizes) // 2


def of_helper(x: Tensor) -> Tensor:
    halves = half(x.shape)
    return x[:, : halves[1]]


def raises_in_a_helper(x: Tensor) -> Tensor:
    def check(sizes: Any) -> None:
        if np.any(sizes < 2):
            raise ValueError("small")

    check(np.array(x.shape[1:3]))
    return x


def updated(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    same = sizes
    sizes *= 2
    return x * same.tolist()[1]


def written(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    sizes[1] = 16
    return x * sizes.tolist()[1]


def written_through_a_view(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    sizes[1:3][...] = (16, 12)
    return x * sizes.tolist()[1]


def written_as_output(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    np.add(sizes, 1, out=sizes)
    return x * sizes.tolist()[2]


def as_key(x: Tensor) -> Tensor:
    return x * {16: 2.0, 20: 3.0}.get(int(np.array(x.shape)[1]), 4.0)


def read_by_name(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    return x * float(locals()["sizes"][1]) + sizes.ndim


def is_an_int(x: Tensor) -> Tensor:
    rows = np.array(x.shape)[1]
    return x * 2 if isinstance(rows, int) else x * 3


def caught(x: Tensor) -> Tensor:
    try:
        check_of_swin_unetr(x)
    except ValueError:
        return x * 2
    return x


def closes_over(x: Tensor) -> float:
    sizes = np.array(x.shape)
    get = lambda: sizes  # noqa: E731 - a function that another one than the caller calls
    return 2.0 if type(get()) is np.ndarray else 3.0


def as_output_by_position(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    np.add(sizes, 13, sizes)
    return x * sizes.tolist()[2]


def given_another_shape(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    sizes.shape = (2, 2)  # pyright: ignore[reportDeprecated]
    return x * sizes.tolist()[1][0]


def text_of_an_error(x: Tensor) -> Tensor:
    sizes = np.array(x.shape)
    try:
        raise ValueError(f"sizes {sizes}")
    except ValueError as error:
        return x * len(str(error))


def text_of_a_helper_s_error(x: Tensor) -> Tensor:
    try:
        raises_in_any_case(x)
    except ValueError as error:
        return x * len(str(error))
    return x


def raises_in_any_case(x: Tensor) -> None:
    sizes = np.array(x.shape) * 1000
    raise ValueError(f"sizes {sizes}")


def written_by(form: str, x: Tensor) -> int:
    return len(form % np.array(x.shape))


def joined_to_others(x: Tensor) -> Tensor:
    sizes = tuple(np.array(x.shape[1:3]) * 2) + (1,)
    return x * (2 if all(isinstance(each, int) for each in sizes) else 3)


FOLLOWED: dict[str, Function] = {
    "of a dtype": lambda x: x * float(np.array(x.shape, dtype=np.float64)[1] / 7),
    "how many": lambda x: x * len(np.array(x.shape)),
    "an assertion": asserts,
    "monai's check": check_of_swin_unetr,
    "a remainder": raises_unless_even,
    "padding": pads,
    "padding by items": pads_by_items,
    "rounded up": rounds,
    "the size of a call": doubled_size,
    "a helper's": of_helper,
    "any": lambda x: x * 2 if np.any(np.array(x.shape[1:3]) < 1) else x,
    "all": lambda x: x * 2 if np.all(np.array(x.shape[1:3])) else x,
    "an array of all ones": lambda x: x * (np.array(x.shape) + np.array((1, 2, 3, 4))).tolist()[2],
    "from the left": lambda x: x * (100 - 2 * np.array(x.shape)).tolist()[1],
    "two of them": lambda x: x * (np.array(x.shape[1:3]) * np.array(x.shape[2:4])).tolist()[0],
    "a divisor": lambda x: x * (1000 // np.array(x.shape[1:3])).tolist()[0],
    "a ratio": lambda x: x * (np.array(x.shape) / 7).tolist()[1],
    "a root": lambda x: x * np.sqrt(np.array(x.shape)).tolist()[1],
    "a copy": lambda x: x * np.array(x.shape).copy().tolist()[1],
    "a part by a traced index": lambda x: x * np.array(x.shape)[x.dim() - 3 :].tolist()[0],
    "an item": lambda x: x * float(np.array(x.shape)[1]),
    "items": lambda x: x * float(sum([int(each) for each in np.array(x.shape)])),
    "a product": lambda x: x * float(np.array(x.shape[1:]).prod()),
    "a mean": lambda x: x * float(np.array(x.shape[1:]).mean()),
    "the largest": lambda x: x * float(np.max(np.array(x.shape))),
    "the smaller": lambda x: x * np.minimum(np.array(x.shape), 18).tolist()[1],
    "wrapped round": lambda x: x * float((np.array(x.shape) * 10**18).tolist()[1] % 1000),
    "zero": lambda x: x * (7 // (np.array(x.shape[1:3]) - 16)).tolist()[0],
    "starred": lambda x: x.flatten().view(*np.array(x.shape)),
    "equal arrays": lambda x: x * 2 if np.array_equal(np.array(x.shape[2:]) * 0, (0, 0)) else x,
}
READ: dict[str, Function] = {
    "a variable of a closure": lambda x: x * closes_over(x),
    "output by position": as_output_by_position,
    "another shape": given_another_shape,
    "the text of an error": text_of_an_error,
    "the text of a helper's error": text_of_a_helper_s_error,
    "text by a name": lambda x: x * written_by("%s", x),
    "text of a tuple": lambda x: x * len(f"{tuple(np.array(x.shape))}"),
    "joined to others": joined_to_others,
    "an argument of a helper": raises_in_a_helper,
    "updated": updated,
    "written": written,
    "written through a view": written_through_a_view,
    "written as output": written_as_output,
    "a key": as_key,
    "read by name": read_by_name,
    "an item that may be an int": is_an_int,
    "a check in a try": caught,
    "the class": lambda x: x * 2 if isinstance(np.array(x.shape), np.ndarray) else x,
    "the type": lambda x: x * 2 if type(np.array(x.shape)) is np.ndarray else x,
    "rows of sizes": lambda x: x * (np.array([x.shape[:2], x.shape[1:3]]) // 2).tolist()[1][0],
    "a dtype": lambda x: x * np.array(x.shape, dtype="int64").tolist()[1],
    "an array of an array": lambda x: x * np.asarray(np.array(x.shape), np.float64).tolist()[1],
    "a place": lambda x: x * float(np.array(x.shape).argmax()),
    "joined": lambda x: x * np.concatenate([np.array(x.shape), [1]]).tolist()[1],
    "a tensor": lambda x: x * torch.tensor(np.array(x.shape))[1],
    "memory": lambda x: x * torch.from_numpy(np.array(x.shape))[1],
    "another dtype": lambda x: x * float(np.array(x.shape).astype(np.int8)[1]),
    "a number of eight bits": lambda x: x * float((np.array(x.shape) * np.int8(20))[1]),
    "made of another dtype": lambda x: x * (np.array(x.shape, np.int8) * np.int8(20)).tolist()[1],
    "beside floats": lambda x: x * np.array([x.shape[1], 0.5]).tolist()[0],
    "a list of floats and ints": lambda x: x * (np.array(x.shape[:2]) + [0.5, 1]).tolist()[1],
    "a number alone": lambda x: x * float(np.array(x.shape[1])),
    "reshaped": lambda x: x * np.array(x.shape).reshape(2, 2).tolist()[0][1],
    "a decision about an item": lambda x: x * 2 if np.array(x.shape)[1] > 18 else x,
    "a decision about the sum": lambda x: x * 2 if np.array(x.shape).sum() > 36 else x,
    "a decision about one sum": lambda x: x * 2 if np.array(x.shape).sum() == sum(SHAPES[3]) else x,
    "text": lambda x: x * len(str(np.array(x.shape) * 50)),
    "text of a format": lambda x: x * len(f"{np.array(x.shape) * 50}"),
    "bytes": lambda x: x * float(sum(np.array(x.shape).tobytes())),
    "whether it is in it": lambda x: x * 2 if 16 in np.array(x.shape) else x,
}


def extractor_of(model: nn.Module) -> featx.DualGraphModule:
    return featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(EXAMPLE), adaptive=False)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow")
@pytest.mark.parametrize("name", FOLLOWED)
def test_computing_leaves_sizes_free(name: str) -> None:
    model = BehindALayer(FOLLOWED[name])
    extractor = extractor_of(model)
    compared = 0
    for shape in SHAPES:
        x = torch.rand(shape)
        try:
            expected = model(x)
        except (AssertionError, ValueError):
            with pytest.raises(featx.SpecializationError):
                extractor(x)
            continue
        compared += 1
        found = extractor(x)["output"]
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert compared > 3


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow")
@pytest.mark.parametrize("name", READ)
def test_what_else_reads_them_is_right_or_refused(name: str) -> None:
    model = BehindALayer(READ[name])
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


def test_a_function_without_source_fixes_the_sizes() -> None:
    namespace: dict[str, Any] = {"np": np}
    exec("def check(x):\n    assert (np.array(x.shape) > 0).all()\n    return x * 2", namespace)
    model = BehindALayer(namespace["check"])
    extractor = extractor_of(model)
    x = torch.rand(EXAMPLE)
    assert torch.equal(extractor(x)["output"], model(x))
    with pytest.raises(featx.SpecializationError, match="is fixed"):
        extractor(torch.rand(2, 20, 12, 3))
