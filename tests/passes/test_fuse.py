"""Fused layers against eager ones, in float64: weights are computed in float64 too, so 1e-10 is a strict bound."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.optimization import fuse as torch_fx_fuse

from featx import GraphModule, symbolic_trace, trace
from featx.errors import PassError, SpecializationError
from featx.passes import fuse_conv_bn

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), nn.BatchNorm1d, (2, 4, 8)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d, (2, 4, 6, 5)),
    "conv2d without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d, (2, 4, 6, 5)),
    "grouped conv2d": (lambda: nn.Conv2d(4, 8, 3, 1, 1, 1, 4, padding_mode="reflect"), nn.BatchNorm2d, (2, 4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), nn.BatchNorm3d, (2, 2, 4, 4, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d, (2, 4, 8)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False), nn.BatchNorm2d, (2, 4, 4, 4)),
    "grouped transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d, (2, 4, 4, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, 2, groups=2), nn.BatchNorm3d, (2, 2, 3, 3, 3)),
    "linear": (lambda: nn.Linear(4, 6), nn.BatchNorm1d, (5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 6, bias=False), nn.BatchNorm1d, (5, 4)),
}  # fmt: skip


def worn(model: nn.Module) -> nn.Module:
    """Return `model` in eval mode and float64, its norms with statistics and weights as after training."""
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            for tensor in (part.running_var, part.weight):
                if tensor is not None:
                    nn.init.uniform_(tensor, 0.5, 2.0)
            for tensor in (part.running_mean, part.bias):
                if tensor is not None:
                    nn.init.uniform_(tensor, -1.0, 1.0)
    return model.double().eval()


def pair(name: str, **options: Any) -> tuple[nn.Sequential, torch.Tensor]:
    layer, norm, shape = CASES[name]
    first = layer()
    channels = first.out_features if isinstance(first, nn.Linear) else first.out_channels
    assert isinstance(channels, int)
    second = norm(channels, **options)  # type: ignore[call-arg]
    model = worn(nn.Sequential(first, second, nn.ReLU()))
    assert isinstance(model, nn.Sequential)
    return model, torch.randn(*shape, dtype=torch.float64)


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def calls(gm: GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("name", CASES)
def test_fused_layer_computes_what_both_did(name: str) -> None:
    model, x = pair(name)
    gm = symbolic_trace(model)
    assert fuse_conv_bn(gm)
    gm.graph.lint()
    assert_close(gm(x), model(x))
    assert calls(gm) == ["_0_fused", "2"]
    assert type(gm.get_submodule("_0_fused")) is type(model[0])
    assert not hasattr(gm, "0")
    assert not hasattr(gm, "1")
    assert not fuse_conv_bn(gm)


@pytest.mark.parametrize("options", [{"affine": False}, {"eps": 0.3}])
def test_norms_of_every_kind_are_fused(options: dict[str, Any]) -> None:
    model, x = pair("conv2d", **options)
    gm = symbolic_trace(model)
    assert fuse_conv_bn(gm)
    assert_close(gm(x), model(x))


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_norms_without_a_weight_or_a_bias_are_fused(missing: str) -> None:
    model, x = pair("conv2d")
    model[1].register_parameter(missing, None)
    gm = symbolic_trace(model)
    assert fuse_conv_bn(gm)
    assert_close(gm(x), model(x))


def test_values_in_float32_and_half_precision_are_close() -> None:
    model, x = pair("conv2d")
    exact = model(x)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        small = copy.deepcopy(model).to(dtype)
        gm = symbolic_trace(small)
        assert fuse_conv_bn(gm)
        result = gm(x.to(dtype))
        assert result.dtype is dtype
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


def test_original_model_is_untouched_and_shares_no_weights_with_the_fused_layer() -> None:
    model, x = pair("conv2d")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, expected = list(model), model(x)
    gm = symbolic_trace(model)
    fuse_conv_bn(gm)
    assert list(model) == modules
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.zero_()
    assert torch.equal(model(x), expected)


def test_copies_of_the_module_keep_their_layers() -> None:
    model, x = pair("conv2d")
    gm = symbolic_trace(nn.Sequential(model, nn.Identity()).eval())
    other = copy.copy(gm)
    expected = other(x)
    assert fuse_conv_bn(gm)
    assert torch.equal(other(x), expected)


def test_fused_parameters_need_gradients_where_those_of_the_layer_did() -> None:
    model, x = pair("conv2d without bias")
    gm = symbolic_trace(model)
    fuse_conv_bn(gm)
    assert all(parameter.requires_grad for parameter in gm.parameters())
    model.requires_grad_(False)
    gm = symbolic_trace(model)
    fuse_conv_bn(gm)
    assert not gm(x).requires_grad


def test_graph_refuses_train_mode_from_then_on() -> None:
    model, x = pair("conv2d")
    gm = symbolic_trace(model)
    fuse_conv_bn(gm)
    with pytest.raises(SpecializationError, match="batch norms were fused"):
        gm.train()(x)


def test_module_in_train_mode_is_refused_and_stays_as_it_is() -> None:
    gm = symbolic_trace(pair("conv2d")[0].train())
    before = gm.code
    with pytest.raises(PassError, match=r"Sequential in train mode.*eval\(\)"):
        fuse_conv_bn(gm)
    assert gm.code == before


@pytest.mark.parametrize(("name", "others"), [("linear", (3, 5, 4)), ("conv1d", (4, 8))])
def test_input_of_another_rank_is_refused_where_it_means_other_channels(name: str, others: tuple[int, ...]) -> None:
    model, x = pair(name)
    gm = symbolic_trace(model)
    fuse_conv_bn(gm)
    assert_close(gm(x), model(x))
    with pytest.raises(SpecializationError, match="'_0'"):
        gm(torch.randn(*others, dtype=torch.float64))


def test_linear_layer_on_three_dimensions_is_left_alone_where_the_trace_knows_them() -> None:
    model = worn(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    x = torch.randn(2, 6, 4, dtype=torch.float64)  # the norm takes the second dimension for the channels
    gm = trace(model, x)
    assert not fuse_conv_bn(gm)
    assert torch.equal(gm(x), model(x))


class Model(nn.Module):
    def __init__(self, body: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.conv, self.other, self.norm = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda m, x: (y := m.conv(x)) + m.norm(y), id="the layer is read elsewhere"),
        pytest.param(lambda m, x: m.norm(m.other(m.conv(x))) + m.conv(x), id="the layer is called twice elsewhere"),
        pytest.param(lambda m, x: m.norm(m.norm(m.conv(x))), id="the norm is called twice"),
        pytest.param(lambda m, x: m.norm(torch.relu(m.conv(x))), id="something stands between"),
        pytest.param(lambda m, x: m.norm(x), id="no layer"),
        pytest.param(lambda m, x: (y := m.conv(x), m.conv.weight.add_(1), m.norm(y))[2], id="written layer"),
        pytest.param(lambda m, x: (y := m.conv(x), m.norm.running_mean.add_(1), m.norm(y))[2], id="written norm"),
    ],
)
def test_layers_that_are_used_otherwise_are_fused_only_where_nothing_changes(body: Callable[..., Any]) -> None:
    model = worn(Model(body))
    gm = symbolic_trace(model)
    changed = fuse_conv_bn(gm)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        # Both write the weights that they share: as often for one as for the other.
        state = copy.deepcopy(model.state_dict())
        found = gm(x)
        model.load_state_dict(state)
        assert_close(found, model(x))
    assert changed is ("other" in body.__code__.co_names)


def test_layer_and_norm_in_other_modes_stay() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.conv(x)
        return m.norm(y)

    model = worn(Model(body)).float()
    x = torch.randn(2, 3, 4, 4)
    gm = trace(model, x)
    assert not fuse_conv_bn(gm)
    assert torch.equal(gm(x), model(x))


def test_norm_of_other_channels_stays_and_the_run_raises() -> None:
    model = worn(Model(lambda m, x: m.norm(m.conv(x))))
    model.norm = worn(nn.BatchNorm2d(5))
    gm = symbolic_trace(model)
    assert not fuse_conv_bn(gm)
    with pytest.raises(RuntimeError, match="running_mean"):
        gm(torch.randn(2, 3, 4, 4, dtype=torch.float64))


def test_input_that_is_overwritten_between_layer_and_norm_is_read_before() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        x.zero_()
        return m.norm(y) + x

    model = worn(Model(body))
    gm = symbolic_trace(model)
    assert fuse_conv_bn(gm)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert_close(gm(x.clone()), model(x.clone()))


def test_modules_with_hooks_and_of_own_classes_and_frozen_otherwise_are_left_alone() -> None:
    class OwnConv(nn.Conv2d):
        pass

    for change in ("hook", "class", "statistics", "train"):
        model = worn(Model(lambda m, x: m.norm(m.conv(x))))
        if change == "hook":
            model.conv.register_forward_hook(lambda *_: None)
        elif change == "class":
            model.conv = OwnConv(3, 3, 1).double().eval()
        elif change == "statistics":
            model.norm = nn.BatchNorm2d(3, track_running_stats=False).double().eval()
        else:
            model.norm.train()
        gm = symbolic_trace(model)
        before = str(gm.graph)
        assert not fuse_conv_bn(gm), change
        assert str(gm.graph) == before


def test_weights_that_the_graph_reads_stay() -> None:
    model = worn(Model(lambda m, x: m.norm(m.conv(x)) + m.conv.weight.sum()))
    gm = symbolic_trace(model)
    fuse_conv_bn(gm)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert_close(gm(x), model(x))
    assert gm.get_parameter("conv.weight") is model.conv.weight


def test_names_and_meta_of_the_norm_stay() -> None:
    model, x = pair("conv2d")
    gm = trace(model, x)
    norm = next(node for node in gm.graph.nodes if node.target == "1")
    name, meta = norm.name, dict(norm.meta)
    fuse_conv_bn(gm)
    assert (norm.name, norm.target) == (name, "_0_fused")
    assert norm.meta["qualified_name"] == meta["qualified_name"]


def test_results_are_those_of_torch_fx() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)),
        nn.Flatten(), nn.Linear(4 * 16, 5), nn.BatchNorm1d(5),
    )  # fmt: skip
    worn(model)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    gm = symbolic_trace(model)
    fuse_conv_bn(gm)
    peer = torch_fx_fuse(model)
    assert_close(gm(x), peer(x))
    kinds = [type(gm.get_submodule(target)).__name__ for target in calls(gm)]
    assert kinds == ["Conv2d", "ReLU", "Conv2d", "Flatten", "Linear"]
