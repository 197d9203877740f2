"""Arrays that numpy makes of sizes: followed from the constructor to the call of torch that takes them, else fixed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy import linspace
from small_models import BehindALayer
from torch import Tensor, nn

import featx

Function = Callable[[Tensor], Tensor]


def grid_of_fno(x: Tensor) -> Tensor:
    """Return what `get_grid` of the official implementation of the Fourier neural operator does."""
    batch, height, width = x.shape[0], x.shape[1], x.shape[2]
    rows = torch.tensor(np.linspace(0, 1, height), dtype=torch.float)
    rows = rows.reshape(1, height, 1, 1).repeat([batch, 1, width, 1])
    columns = torch.tensor(np.linspace(0, 1, width), dtype=torch.float)
    columns = columns.reshape(1, 1, width, 1).repeat([batch, height, 1, 1])
    return torch.cat((x, rows, columns), dim=-1).to(x.device)


def written_after(x: Tensor) -> Tensor:
    table = torch.tensor(np.arange(x.shape[1]))
    table[0] = 7
    return x + table[:, None, None]


FOLLOWED: dict[str, Function] = {
    "grid": grid_of_fno,
    "a name of the function": lambda x: x + torch.tensor(linspace(0, 1, x.shape[1]))[:, None, None],
    "a computed number": lambda x: x + torch.tensor(np.linspace(0, 1, 2 * x.shape[1] // 2))[:, None, None],
    "bounds": lambda x: x + torch.from_numpy(np.linspace(-x.shape[1] / 2, x.shape[1], x.shape[1]))[:, None, None],
    "range": lambda x: x + torch.from_numpy(np.arange(x.shape[1]))[:, None, None],
    "range of a dtype": lambda x: x + torch.as_tensor(np.arange(x.shape[1], dtype=np.float32))[:, None, None],
    "zeros": lambda x: x + torch.tensor(np.zeros((x.shape[1], x.shape[2])))[:, :, None],
    "ones, by position": lambda x: x * torch.from_numpy(np.ones([x.shape[1], x.shape[2]], np.float32))[:, :, None],
    "full, by name": lambda x: x * torch.from_numpy(np.full(shape=x.shape[1], fill_value=x.shape[2]))[:, None, None],
    "written after": written_after,
    "of a dtype of Python": lambda x: x + torch.tensor(np.arange(0, x.shape[1], dtype=float))[:, None, None],
}


SHAPES = ((2, 6, 5, 3), (1, 8, 9, 3), (3, 5, 5, 3), (2, 1, 1, 3), (2, 40, 2, 3), (2, 6, 5, 3))


class Ends(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x + 1, np.arange(x.shape[1])


def extractor_of(model: nn.Module) -> featx.DualGraphModule:
    return featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 6, 5, 3), adaptive=False)


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_torch_makes_of_it_leaves_sizes_free(name: str) -> None:
    model = BehindALayer(FOLLOWED[name])
    extractor = extractor_of(model)
    for training in (False, True):
        extractor.train(training)
        model.train(training)
        for shape in SHAPES:
            x = torch.rand(shape)
            found, expected = extractor(x)["output"], model(x)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_copies_and_generated_code_do_the_same(tmp_path: Path) -> None:
    model = BehindALayer(grid_of_fno)
    graph = featx.trace(model, torch.rand(2, 6, 5, 3))
    extractor = extractor_of(model)
    x = torch.rand(3, 9, 4, 3)
    assert torch.equal(graph(x), model(x))
    assert torch.equal(copy.deepcopy(extractor)(x)["output"], model(x))
    graph.function = None
    assert torch.equal(pickle.loads(pickle.dumps(graph))(x), model(x))


def written_before(x: Tensor) -> Tensor:
    table = np.zeros(x.shape[1])
    table[0] = 3
    return x + torch.tensor(table)[:, None, None]


def written_before_in_place(x: Tensor) -> Tensor:
    table = np.arange(x.shape[1])
    table += 2
    return x + torch.from_numpy(table)[:, None, None]


def written_with_what_is_there(x: Tensor) -> Tensor:
    table = np.linspace(-1, 2, x.shape[1])  # ends with 2, but for one item
    table[-1:] = 2
    return x + torch.tensor(table)[:, None, None]


def ones_of_grid(x: Tensor) -> Tensor:
    rows, columns = np.meshgrid(np.linspace(0, 1, x.shape[2]), np.linspace(0, 1, x.shape[1]))
    return x + torch.tensor(rows * columns)[:, :, None]


READ: dict[str, Function] = {
    "written before": written_before,
    "written before in place": written_before_in_place,
    "written with what is there": written_with_what_is_there,
    "mesh": ones_of_grid,
    "computed": lambda x: x + torch.tensor(np.arange(x.shape[1]) / 2)[:, None, None],
    "reshaped": lambda x: x + torch.tensor(np.arange(x.shape[1]).reshape(-1, 1, 1)),
    "an item": lambda x: x + float(np.linspace(0, 1, x.shape[1])[1 % x.shape[1]]),
    "a length": lambda x: x + len(np.arange(x.shape[1])),
    "a sum": lambda x: x + float(np.ones((x.shape[1], 2)).sum()),
    "a list": lambda x: x + torch.tensor(np.arange(x.shape[1]).tolist())[:, None, None],
    "a part": lambda x: x[:, : int(np.arange(x.shape[1])[:4].sum())],
    "the distance": lambda x: x + float(np.linspace(0, 1, x.shape[1], retstep=True)[1]),
    "an old constructor": lambda x: x + torch.Tensor(np.arange(x.shape[1]))[:, None, None],
    "identity": lambda x: x + torch.tensor(np.eye(x.shape[1], x.shape[2], dtype="float64"))[:, :, None],
    "columns first": lambda x: x + torch.tensor(np.zeros((x.shape[1], x.shape[2]), order="F"))[:, :, None],
    "a decision": lambda x: x * 2 if np.arange(x.shape[1]).max() > 6 else x,
}


@pytest.mark.parametrize("name", READ)
def test_what_else_is_done_with_it_is_right_or_refused(name: str) -> None:
    model = BehindALayer(READ[name]).eval()
    extractor = extractor_of(model)
    for shape in SHAPES:
        x = torch.rand(shape)
        try:
            found = extractor(x)["output"]
        except featx.SpecializationError:
            assert shape != SHAPES[0]
        else:
            assert torch.equal(found, model(x))


def test_arrays_that_are_equal_for_a_square_are_no_constant() -> None:
    def compared(x: Tensor) -> Tensor:
        return x * 2 if np.array_equal(np.zeros(x.shape[1]), np.zeros(x.shape[2])) else x

    traced = featx.trace(compared, torch.rand(2, 5, 5, 3))
    for shape in ((2, 5, 5, 3), (2, 7, 7, 3), (2, 7, 5, 3)):
        x = torch.rand(shape)
        try:
            found = traced(x)
        except featx.SpecializationError:
            assert shape != (2, 5, 5, 3)
        else:
            assert torch.equal(found, compared(x))


def written_array(x: Tensor) -> Tensor:
    table = np.zeros(x.shape[1])
    tensor = torch.from_numpy(table)
    table[0] = 3
    return x + tensor[:, None, None]


def written_tensor(x: Tensor) -> Tensor:
    table = np.zeros(x.shape[1])
    torch.as_tensor(table).add_(1)
    return x + torch.tensor(table)[:, None, None]


def written_constant(x: Tensor) -> Tensor:
    table = np.arange(4.0)
    tensor = torch.from_numpy(table) if x.shape[1] else torch.as_tensor(table)
    tensor = x * tensor.sum()
    table[0] = 3
    return tensor + torch.as_tensor(table).sum()


@pytest.mark.parametrize("function", [written_array, written_tensor, written_constant])
def test_memory_that_an_array_and_a_tensor_share_must_not_be_written(function: Function) -> None:
    with pytest.raises(featx.TraceError, match="an array of numpy shares with a tensor"):
        extractor_of(BehindALayer(function).eval())


def test_an_array_that_is_returned_fixes_its_length() -> None:
    traced = featx.trace(Ends(), torch.rand(2, 6, 5, 3))
    assert traced(torch.rand(2, 6, 7, 3))[1].tolist() == list(range(6))
    with pytest.raises(featx.SpecializationError):
        traced(torch.rand(2, 7, 5, 3))


def test_it_is_left_out_where_it_is_not_needed() -> None:
    extractor = featx.create_feature_extractor(
        BehindALayer(grid_of_fno), ["first"], example_inputs=torch.rand(2, 6, 5, 3)
    )
    assert all(node.target is not np.linspace for node in extractor.graph.nodes)


def test_torchscript_is_refused_in_words_of_our_own() -> None:
    with pytest.raises(featx.errors.ScriptError, match="no functions of numpy"):
        torch.jit.script(featx.trace(grid_of_fno, torch.rand(2, 6, 5, 3)))


class Keeps(nn.Module):
    """Makes its table in the first call alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = np.linspace(0, 1, x.shape[1])
        return x + torch.tensor(self.table)[: x.shape[1], None, None]


def test_an_array_that_is_kept_is_that_of_the_first_call() -> None:
    model, x = Keeps().eval(), torch.rand(2, 6, 5, 3)
    try:
        extractor = extractor_of(Keeps().eval())
    except featx.TraceError:
        return
    assert torch.equal(extractor(x)["output"], model(x))
    for shape in SHAPES:
        x = torch.rand(shape)
        try:
            found = extractor(x)["output"]
        except featx.SpecializationError:
            continue
        assert torch.equal(found, model(x))


def test_numpy_is_as_before() -> None:
    before = {name: getattr(np, name) for name in ("linspace", "arange", "zeros", "ones", "full")}
    extractor_of(BehindALayer(grid_of_fno))
    assert all(getattr(np, name) is function for name, function in before.items())
