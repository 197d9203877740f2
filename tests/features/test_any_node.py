"""A feature may be any node: a tensor, a tuple, a size, a value inside a default leaf."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import image, run, same
from torch import nn

import featx

Capture = Callable[..., dict[str, list[Any]]]


class Splitting(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :2], x[:, 2:]


class UsesSplit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.split = Splitting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.split(x * 2)
        return left + right


def test_tuple_can_be_a_feature() -> None:
    extractor = featx.create_feature_extractor(UsesSplit(), ["split"], example_inputs=image())
    assert same(extractor(image(3))["split"], (image(3)[:, :2] * 2, image(3)[:, 2:] * 2))


class OfEveryKind(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        batch, width = x.shape
        half = width // 2
        scale = math.sqrt(width)
        x = x.view(batch, 2, half)
        left, _ = x.split(1, 1)
        best = torch.topk(x, 1)
        return left * scale, best.values, x.sum().item(), len(x.size()), x.numel() + batch


def values_of_every_kind(x: torch.Tensor) -> dict[str, Any]:
    """What `OfEveryKind` computes, by the name of the node."""
    y = x.view(x.shape[0], 2, x.shape[1] // 2)
    return {
        "x": x,
        "getattr": x.shape,
        "getitem": x.shape[0],
        "getitem_1": x.shape[1],
        "floordiv": x.shape[1] // 2,
        "sqrt": math.sqrt(x.shape[1]),
        "view": y,
        "split": y.split(1, 1),
        "getitem_2": y[:, :1],
        "getitem_3": y[:, 1:],
        "topk": torch.topk(y, 1),
        "mul": y[:, :1] * math.sqrt(x.shape[1]),
        "sum": y.sum(),
        "item": y.sum().item(),
        "size": y.size(),
        "numel": y.numel(),
        "add": y.numel() + x.shape[0],
    }


def test_every_name_of_the_list_can_be_a_feature_and_has_the_value_of_the_model() -> None:
    names = featx.get_graph_node_names(OfEveryKind(), example_inputs=image())[0]
    assert set(values_of_every_kind(image())) <= set(names)
    extractor = featx.create_feature_extractor(OfEveryKind(), names, example_inputs=image())
    for x in (image(), image(5, seed=1), image(3, 8)):
        result = extractor(x)
        assert same({name: result[name] for name in values_of_every_kind(x)}, values_of_every_kind(x))


@pytest.mark.parametrize("name", values_of_every_kind(image()))
def test_value_of_any_kind_can_be_the_only_feature(name: str) -> None:
    extractor = featx.create_feature_extractor(OfEveryKind(), [name], example_inputs=image())
    for x in (image(), image(5, seed=1)):
        assert same(extractor(x), {name: values_of_every_kind(x)[name]})


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(4, 3, batch_first=True), nn.GRU(4, 3, num_layers=2), nn.MaxPool1d(2, return_indices=True)],
    ids=["lstm", "gru", "pool"],
)
def test_nested_result_of_a_leaf_can_be_a_feature(layer: nn.Module, capture: Capture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    extractor = featx.create_feature_extractor(model, ["1"], example_inputs=torch.rand(2, 5, 4))
    for shape in ((2, 5, 4), (3, 7, 4)):
        x = torch.rand(shape)
        assert same(extractor(x)["1"], capture(model, ["1"], x)["1"][0])


# -- inside a default leaf ---------------------------------------------------------------------------------------------


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


INSIDE = ["linear1", "self_attn", "norm1", "dropout1", "linear2", "norm2"]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("path", ["1.layers.0", *(f"1.layers.1.{name}" for name in INSIDE)])
def test_value_inside_a_default_leaf_can_be_asked_for(path: str, training: bool, capture: Capture) -> None:
    model = transformer().train(training)
    assert path not in featx.get_graph_node_names(model, example_inputs=torch.rand(2, 3, 4))[0]
    extractor = featx.create_feature_extractor(model, {path: "inside", "1": "all"}, example_inputs=torch.rand(2, 3, 4))
    for shape in ((2, 3, 4), (5, 3, 4)):
        x = torch.rand(shape)
        expected = capture(model, [path, "1"], x)
        assert same(run(extractor, x), {"inside": expected[path][0], "all": expected["1"][0]})


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_encoder_that_packs_padded_batches_is_not_opened() -> None:
    model = Padded().eval()
    inputs = (torch.rand(2, 5, 8), torch.arange(5).expand(2, 5) > 2)
    extractor = featx.create_feature_extractor(model, ["encoder", "head"], example_inputs=inputs)
    with torch.no_grad():
        assert torch.equal(extractor(*inputs)["head"], model(*inputs))
    with pytest.raises(featx.TraceError, match=r"nested tensor.*model\.encoder\.use_nested_tensor = False"):
        featx.create_feature_extractor(model, ["encoder.layers.0", "head"], example_inputs=inputs)
    model.encoder.use_nested_tensor = False
    inside = featx.create_feature_extractor(model, ["encoder.layers.0", "head"], example_inputs=inputs)
    assert torch.equal(inside(*inputs)["head"], model(*inputs))


@pytest.mark.parametrize("path", ["se.avgpool", "se.fc1", "se.activation", "se.scale_activation", "mlp.0", "mlp.3"])
def test_value_inside_a_module_of_torchvision_ops_can_be_asked_for(path: str, capture: Capture) -> None:
    ops = pytest.importorskip("torchvision.ops")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.se = ops.SqueezeExcitation(4, 2)
            self.mlp = ops.MLP(6, [3, 4])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.se(x))

    model = Model().eval()
    assert path not in featx.get_graph_node_names(model)[0]
    extractor = featx.create_feature_extractor(copy.deepcopy(model), [path], example_inputs=torch.rand(2, 4, 6, 6))
    x = torch.rand(3, 4, 6, 6)
    assert same(extractor(x)[path], capture(model, [path], x)[path][0])


def test_operation_inside_a_default_leaf_can_be_asked_for(capture: Capture) -> None:
    ops = pytest.importorskip("torchvision.ops")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), ops.SqueezeExcitation(4, 2)).eval()
    x = torch.rand(2, 3, 5, 5)
    extractor = featx.create_feature_extractor(model, ["1.mul"], example_inputs=x)
    assert same(extractor(x)["1.mul"], capture(model, ["1"], x)["1"][0])


# -- what comes after --------------------------------------------------------------------------------------------------


class BadTail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x)
        y = torch.relu(x)
        return y.detach().numpy().tolist()


def test_tail_that_cannot_be_traced_does_no_harm() -> None:
    model = BadTail()
    with pytest.raises(featx.TraceError):
        featx.trace(model, image())
    extractor = featx.create_feature_extractor(model, ["relu"], example_inputs=image())
    assert torch.equal(extractor(image(5))["relu"], torch.relu(model.linear(image(5))))
