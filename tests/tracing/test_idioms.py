"""Lines of published models that no trace may refuse. Each gives what the model gives, at other sizes too."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torch.autograd import Variable
from torch.nn import functional

import featx


class Model(nn.Module):
    """One convolution or linear layer, and the line in question."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.linear = nn.Linear(8, 8)
        self.embedding = nn.Embedding(50, 8)
        self.table = nn.Parameter(torch.rand(1, 16, 8))
        self.mean = torch.rand(1, 3, 1, 1)
        self.register_buffer("offset", torch.rand(1, 3, 1, 1))
        self.width = np.int64(1)
        self.maps: list[Any] = [None] * 3
        self.by_name: dict[str, Any] = {"first": torch.zeros(1)}


class AssignsWhatItConverts(Model):  # SwinIR and its heirs
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean.type_as(x)
        return self.conv(x - self.mean) + self.mean


class MovesABuffer(Model):  # CTRL
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.offset = self.offset.to(device=x.device, dtype=x.dtype)
        if x.sum() > -1e9:  # asks for values, so that the model runs for real
            x = self.conv(x)
        return x + self.offset


class MovesAnAttribute(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean.to(x.device)
        if x.sum() > -1e9:
            x = self.conv(x)
        return x + self.mean


class PadsByNumbersOfNumpy(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(functional.pad(x, (0, self.width, np.int32(1), 0))) * np.float32(2)


class MakesVariables(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = Variable(torch.zeros(x.size(0), 3, 1, 1))
        weight = next(self.parameters()).data
        return self.conv(Variable(x)) + state + Variable(weight.new(x.shape[0], 3, 1, 1).zero_())


class FillsAFloatTensor(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * torch.FloatTensor(3, 1, 1).fill_(2)


class CallsTheClassOfTensors(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.Tensor(x)) + torch.Tensor([1.0])


class FillsAList(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            self.maps[index] = self.conv(x) * index
        return torch.cat(self.maps, 1)


class FillsADict(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.by_name["first"] = self.conv(x)
        return self.by_name["first"] + 1


class TakesTheStartOfATable(Model):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids) + self.table[:, : ids.shape[1]])


class AsksWhetherAQuotientIsWhole(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[2] / 2
        if not half.is_integer():
            raise ValueError("odd")
        return self.conv(x)[:, :, : int(half)]


class LoopsOnceOverAll(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        return torch.cat([self.linear(x[:, at : at + length]) for at in range(0, length, length)], 1)


def images(batch: int, side: int) -> torch.Tensor:
    return torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(side))


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 50


CASES: list[tuple[type[Model], list[torch.Tensor]]] = [
    (AssignsWhatItConverts, [images(2, 8), images(3, 10)]),
    (MovesABuffer, [images(2, 8), images(3, 10)]),
    (MovesAnAttribute, [images(2, 8), images(3, 10)]),
    (PadsByNumbersOfNumpy, [images(2, 8), images(3, 10)]),
    (MakesVariables, [images(2, 8), images(3, 10)]),
    (FillsAFloatTensor, [images(2, 8), images(3, 10)]),
    (CallsTheClassOfTensors, [images(2, 8), images(3, 10)]),
    (FillsAList, [images(2, 8), images(3, 10)]),
    (FillsADict, [images(2, 8), images(3, 10)]),
    (TakesTheStartOfATable, [ids(2, 16), ids(3, 9), ids(1, 5)]),  # the example is as long as the table
    (AsksWhetherAQuotientIsWhole, [images(2, 8), images(3, 12)]),
    (LoopsOnceOverAll, [torch.rand(2, 12, 8), torch.rand(3, 20, 8)]),
]


@pytest.mark.parametrize(("kind", "inputs"), CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_model_is_traced_and_gives_the_same_at_other_sizes(kind: type[Model], inputs: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    traced = featx.trace(model, inputs[0])
    for x in inputs:
        assert torch.equal(traced(x), model(x))


class ReadsTheListFirst(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.maps[0] is not None:
            y = y + self.maps[0]
        self.maps[0] = y
        return y


class AsksWhatTheDictHeld(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = self.by_name["first"].shape[0]
        self.by_name["first"] = self.conv(x)
        return self.by_name["first"] * length


class ReturnsWhatTheDictHeld(Model):
    def forward(self, x: torch.Tensor) -> Any:
        before = self.by_name["first"]
        self.by_name["first"] = self.conv(x)
        return before, self.by_name["first"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ReadsTheListFirst, AsksWhatTheDictHeld, ReturnsWhatTheDictHeld])
def test_item_that_is_read_before_it_is_replaced_is_refused(kind: type[Model]) -> None:
    with pytest.raises(featx.TraceError, match=r"earlier call|next time"):
        featx.trace(kind().eval(), images(2, 8))


FloatTensor = torch.FloatTensor


class CountsInAFloatTensor(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * FloatTensor(x.size(0)).fill_(1).sum()


@pytest.mark.parametrize("check_sizes", ["full", "none"])
def test_a_size_that_an_early_constructor_gets_by_another_name_is_that_of_the_example(check_sizes: Any) -> None:
    """C code gets a plain number there, which no trace can follow."""
    model, x = CountsInAFloatTensor().eval(), images(2, 8)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x, check_sizes=check_sizes)
    assert torch.equal(extractor(x)["output"], model(x))
    for length in (1, 5):
        with pytest.raises(featx.SpecializationError):
            extractor(images(length, 8))


@pytest.mark.parametrize("of_parameter", [False, True])
def test_requires_grad_that_is_assigned(of_parameter: bool) -> None:
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None]
            if of_parameter:
                self.linear.weight.requires_grad = False
            else:
                x.requires_grad = True
            return self.linear(x)

    model = Switching()
    reference = copy.deepcopy(model)
    x = torch.rand(3, 4)
    extractor = featx.create_feature_extractor(model, ["linear"], example_inputs=x)
    assert model.linear.weight.requires_grad
    found, expected = extractor(x)["linear"], reference(x)
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.requires_grad is other.requires_grad
        assert (own.grad is None) is (other.grad is None)
        assert own.grad is None or other.grad is None or torch.equal(own.grad, other.grad)


class ConvertsOnce(nn.Module):
    """Keeps tensors outside of its buffers, which `double()` does not convert, and `cuda()` does not move."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.way = way
        self.table = torch.rand(1, 4, 1, 1)
        self.tables = [torch.rand(4, 1, 1), torch.rand(4, 1, 1)]
        self.by_name = {"a": torch.rand(4, 1, 1)}

    def forward(self, x: torch.Tensor) -> Any:
        y = self.conv(x)
        if self.way == "attribute":
            self.table = self.table.type_as(y)
            return y * self.table
        if self.way == "list":  # AnchorGenerator of torchvision
            self.tables = [table.to(dtype=y.dtype, device=y.device) for table in self.tables]
            return [y * table for table in self.tables]
        if self.way == "item of a list":
            self.tables[1] = self.tables[1].to(y)
            return y * self.tables[1]
        self.by_name["a"] = self.by_name["a"].to(y.dtype)
        return y + self.by_name["a"]


@pytest.mark.parametrize("way", ["attribute", "list", "item of a list", "item of a dict"])
def test_what_the_first_call_converts_for_good(way: str) -> None:
    """The second call finds it converted, and converts nothing."""
    model = ConvertsOnce(way).double().eval()
    x = torch.rand(2, 3, 8, 8, dtype=torch.double)
    extractor = featx.create_feature_extractor(model, ["conv", "output"], example_inputs=x)
    traced = featx.trace(model, example_inputs=x)
    for other in (x, torch.rand(1, 3, 5, 7, dtype=torch.double)):
        expected = copy.deepcopy(model)(other)
        for found in (extractor(other)["output"], traced(other)):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


class ConvertsAndScales(nn.Module):
    """Its second call does not compute what its first one does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.rand(1, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = (self.table * 2).to(x.dtype)
        return x * self.table


def test_what_each_call_converts_anew_is_refused() -> None:
    with pytest.raises(featx.TraceError):
        featx.trace(ConvertsAndScales().double(), example_inputs=torch.rand(2, 3, 4, 4, dtype=torch.double))


class YoloHead(nn.Module):
    """The head of YOLOv5: grids that are made anew where the size is another, and in-place writes of the boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 3 * 7, 1)
        self.register_buffer("anchors", torch.rand(3, 2))
        self.grid = self.anchor_grid = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(self.stem(x))
        batch, _, height, width = x.shape
        x = x.view(batch, 3, 7, height, width).permute(0, 1, 3, 4, 2).contiguous()
        if self.grid.shape[2:4] != x.shape[2:4]:
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            self.grid = torch.stack((columns, rows), 2).expand(1, 3, height, width, 2).float()
            self.anchor_grid = (self.anchors.clone() * 2).view(1, 3, 1, 1, 2).expand(1, 3, height, width, 2)
        y = x.sigmoid()
        y[..., 0:2] = (y[..., 0:2] * 2 - 0.5 + self.grid) * 2
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * self.anchor_grid
        return y.view(batch, -1, 7)


@pytest.mark.slow
def test_the_head_of_yolo_at_other_batches_and_sizes() -> None:
    model = YoloHead().eval()
    extractor = featx.create_feature_extractor(model, ["head", "output"], example_inputs=images(2, 16))
    for x in (images(2, 16), images(1, 16), images(5, 16), images(3, 24), images(2, 16)):
        assert torch.equal(extractor(x)["output"], copy.deepcopy(model)(x))


class Rotary(nn.Module):
    """Attention with a table of positions that the first call makes, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None].cos()
        return self.drop(self.linear(x) * self.table)


@pytest.mark.slow
def test_a_table_whose_device_follows_from_what_is_drawn_is_not_drawn() -> None:
    model = nn.Sequential(Rotary(), Rotary()).train()
    x = torch.rand(2, 6, 8)
    traced = featx.trace(model, x)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(traced(x), expected)


class Indices(nn.Module):  # ConViT of timm 1.0.29
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.indices = torch.zeros(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.indices.shape[1] != x.shape[1]:
            places = torch.zeros(1, x.shape[1], 2)
            places[:, :, 0] = torch.arange(x.shape[1]).pow(2)
            self.indices = places
        return self.linear(x) + self.indices.sum()


@pytest.mark.slow
def test_a_name_inside_of_what_the_first_call_alone_computes_is_refused_with_the_reason() -> None:
    model, x = Indices().eval(), torch.rand(2, 6, 8)
    assert "pow" in featx.get_graph_node_names(model, example_inputs=x)[1]
    with pytest.raises(featx.TraceError, match=r"computes 'pow' in its first call alone.*leave it out"):
        featx.create_feature_extractor(model, ["pow", "linear"], example_inputs=x)
    assert torch.equal(featx.create_feature_extractor(model, ["output"], example_inputs=x)(x)["output"], model(x))


@pytest.mark.slow
@pytest.mark.sweep
def test_detection_in_double_precision() -> None:
    """Anchors are kept in a list outside of the buffers, and the first call converts them."""
    model: Any = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    model.transform.min_size, model.transform.max_size = (120,), 160
    model.double().eval()
    inputs = [torch.rand(3, 120, 160, dtype=torch.double)]
    traced = featx.trace(model, inputs)
    for given in (inputs, [torch.rand(3, 120, 160, dtype=torch.double)]):
        torch.testing.assert_close(traced(given), copy.deepcopy(model)(given), rtol=0, atol=0)


class ConvertsAndWrites(nn.Module):
    """Converts what it keeps, and writes into it: each call computes with other values."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(3, 3), way
        self.mean = torch.zeros(3, dtype=torch.double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean.to(x)
        if self.way == "slice":
            self.mean[:] = 0.9 * self.mean + 0.1 * x.mean(0)
        elif self.way == "view":
            self.mean.view(-1).add_(1)
        elif self.way == "out":
            torch.mul(self.mean + 1, 2, out=self.mean)
        else:
            self.mean.data.add_(1)
        return self.linear(x - self.mean)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["slice", "view", "out", "data"])
def test_what_is_converted_and_then_written_is_state(way: str) -> None:
    with pytest.raises(featx.TraceError):
        featx.create_feature_extractor(ConvertsAndWrites(way).eval(), ["linear"], example_inputs=torch.rand(4, 3))


class KeepsTheFormOfWhatItDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.count is None:
            self.count = torch.ones_like((torch.rand(16) > 0.5).nonzero()).sum()
        return x * self.count


@pytest.mark.slow
def test_a_form_that_follows_from_what_is_drawn_is_drawn() -> None:
    with pytest.raises(featx.TraceError, match="draws random numbers in its first call"):
        featx.trace(KeepsTheFormOfWhatItDraws(), torch.rand(3))


def test_an_operator_of_a_library_with_the_name_of_a_conversion_is_none() -> None:
    library = torch.library.Library("featx_test_idioms", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("double", torch.empty_like, "Meta")

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table = torch.ops.featx_test_idioms.double(self.table)
            return x * self.table

    with pytest.raises(featx.TraceError):
        featx.trace(Doubles(), torch.rand(3))
