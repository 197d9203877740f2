"""Calls of `int`, `float` and `len` are followed, so that what they give is no constant of the graph."""

from __future__ import annotations

import builtins
import linecache
import types
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx

_FILES = count()


def forward_of(*lines: str, extra: str = "") -> nn.Module:
    """Make a module of its own file whose forward has these lines."""
    body = "".join(f"        {line}\n" for line in lines)
    source = (
        f"import torch\nfrom torch import nn\n\nclass Model(nn.Module):\n    def forward(self, x):\n{body}\n{extra}\n"
    )
    name = f"conversions_{next(_FILES)}"
    file = f"/made/{name}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = types.ModuleType(name)
    exec(compile(source, file, "exec"), vars(namespace))
    return vars(namespace)["Model"]()


@pytest.mark.parametrize(
    ("extra", "is_free"),
    [
        ("from math import *", True),
        ("from typing import *", True),
        ("from builtins import *", False),
        ("from numpy.compat import *", False),
    ],
)
def test_names_that_are_imported_with_a_star(extra: str, is_free: bool) -> None:
    guarded = f"try:\n    {extra}\nexcept ImportError:\n    pass"
    model, length = forward_of("return x[:, : int(x.shape[1] * 0.5)]", extra=guarded), 12
    extractor = featx.create_feature_extractor(model.eval(), ["output"], example_inputs=torch.rand(2, 8))
    x = torch.rand(2, length)
    if is_free:
        assert torch.equal(extractor(x)["output"], model(x))
    else:
        with pytest.raises(featx.SpecializationError):
            extractor(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        ("return x.view(int(x.shape[0] / 2), -1)",),
        ("side = int(x.shape[1] ** 0.5)", "return x.view(-1, side, side)"),
        ("return x * float(x.shape[0]) ** -0.5",),
        ("rows, _ = map(int, x.shape)", "return x.reshape(rows * 2, -1)"),
        ("return x.new_zeros(int(x.shape[0] * 1.5), 2)",),
        ("rows = int(x.shape[0])", "return x.reshape(rows * 2, -1) if isinstance(rows, int) else x"),
        ("rows = int(x.shape[0])", "return x.reshape(rows * 2, -1) if type(rows) == int else x"),
        ("rows = int(x.shape[0])", "return x.reshape(rows * 2, -1) if type(rows) in {int, float} else x"),
        ("rows = int(x.shape[0])", "return x.reshape(rows * 2, -1) if float != type(rows) else x"),
        ("rows = int(x.shape[0])", "return x if type(rows) not in (int, bool) else x.reshape(rows * 2, -1)"),
        ("return x.view(len(x) * 2, -1) + len([1, 2])",),
        ("return x + sum(map(len, [x, x * 2]))",),
        ("rows: int = int(float(x.shape[0]))", "return x + rows"),
        ("return (lambda n: x + int(n / 3))(x.shape[0])",),
    ],
)
def test_conversion_of_a_size_is_part_of_the_graph(lines: tuple[str, ...]) -> None:
    model = forward_of(*lines)
    before = dict(vars(model.forward.__func__)), set(model.forward.__globals__)  # pyright: ignore[reportFunctionMemberAccess]
    graph = featx.trace(model, torch.rand(4, 16))
    for shape in ((4, 16), (6, 16), (10, 4), (2, 64)):
        x = torch.rand(shape)
        assert torch.equal(graph(x), model(x))
    after = dict(vars(model.forward.__func__)), set(model.forward.__globals__)  # pyright: ignore[reportFunctionMemberAccess]
    assert after == before
    assert int is builtins.int


def test_a_dtype_of_numpy_is_no_other_use_of_the_name() -> None:
    model = forward_of(
        "numbers = np.array([1.5]).astype(int) + np.zeros(1, dtype=int) + np.ones(1).astype(dtype=float)",
        "return x.view(int(x.shape[0] / 2), -1) * float(numbers[0])",
        extra="import numpy as np",
    )
    graph = featx.trace(model, torch.rand(4, 16))
    for shape in ((4, 16), (6, 16), (10, 4)):
        x = torch.rand(shape)
        assert torch.equal(graph(x), model(x))


@pytest.mark.parametrize(
    ("lines", "extra"),
    [
        (("rows = int(x.shape[0] / 2)", "return x + rows if type(rows) is int else x"), ""),
        (("return x + int(x.shape[0] / 2)",), "def helper(kind=None):\n    return kind or int"),
        (("return x + int(x.shape[0] / 2)",), "def int(value):\n    return 7"),
        (("return x + int(x.shape[0] / 2)",), "def other(int):\n    return int(1)"),
        (("return x + int(x.shape[0] / 2) + torch.zeros(1, dtype=int)",), ""),
    ],
)
def test_file_that_uses_the_name_otherwise_gives_a_checked_constant(lines: tuple[str, ...], extra: str) -> None:
    model = forward_of(*lines, extra=extra)
    graph = featx.trace(model, torch.rand(4, 16))
    x = torch.rand(4, 16)
    assert torch.equal(graph(x), model(x))
    other = torch.rand(7, 16)
    try:
        result = graph(other)
    except featx.SpecializationError:
        return
    assert torch.equal(result, model(other))


def value_of(x: Tensor) -> Tensor:
    return x * int(x.sum())


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except featx.SpecializationError:
        return True
    return False


def test_int_of_a_tensor_is_still_checked() -> None:
    graph = featx.trace(value_of, torch.full((2,), 3.0))
    assert torch.equal(graph(torch.full((2,), 3.0)), torch.full((2,), 18.0))
    assert refused(lambda: graph(torch.full((2,), 4.0)))


def test_official_window_attention_takes_any_batch_and_size() -> None:
    # As in the code that the paper "Swin Transformer" was published with.
    model = forward_of(
        "rows, height, width, channels = x.shape",
        "x = x.view(rows, height // 4, 4, width // 4, 4, channels).permute(0, 1, 3, 2, 4, 5)",
        "windows = torch.tanh(x.contiguous().view(-1, 4, 4, channels))",
        "rows = int(windows.shape[0] / (height * width / 4 / 4))",
        "x = windows.view(rows, height // 4, width // 4, 4, 4, -1).permute(0, 1, 3, 2, 4, 5)",
        "return x.contiguous().view(rows, height, width, -1)",
    )
    graph = featx.trace(model, torch.rand(2, 8, 8, 3))
    for shape in ((2, 8, 8, 3), (3, 8, 8, 3), (1, 16, 12, 3)):
        x = torch.rand(shape)
        assert torch.equal(graph(x), model(x))
