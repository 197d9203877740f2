"""fold_layer_scale, merge_parallel_linears and remove_identity, against the unedited graph in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from featx import GraphModule, symbolic_trace, trace
from featx.passes import fold_layer_scale, merge_parallel_linears, remove_identity


class Scaled(nn.Module):
    """A layer with a factor for each channel."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], product: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer = layer
        self.gamma = nn.Parameter(torch.rand(shape) + 0.5)
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.product(self.layer(x), self.gamma)


SCALED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 6), (6,), (2, 5, 6)),
    "linear without bias": (lambda: nn.Linear(6, 6, bias=False), (1, 1, 6), (2, 5, 6)),
    "conv1d": (lambda: nn.Conv1d(6, 6, 3, padding=1), (6, 1), (2, 6, 5)),
    "conv2d": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=2), (1, 6, 1, 1), (2, 6, 5, 4)),
    "conv3d": (lambda: nn.Conv3d(6, 6, 1), (6, 1, 1, 1), (2, 6, 3, 2, 4)),
}
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "x * g": lambda x, g: x * g,
    "g * x": lambda x, g: g * x,
    "x.mul(g)": lambda x, g: x.mul(g),
    "x.mul_(g)": lambda x, g: x.mul_(g),
    "torch.mul": torch.mul,
}


def traced(model: nn.Module, x: torch.Tensor) -> tuple[GraphModule, torch.Tensor]:
    model = model.double().eval()
    gm = trace(model, x)
    return gm, model(x)


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def multiplications(gm: GraphModule) -> int:
    return sum("mul" in str(getattr(node.target, "__name__", node.target)) for node in gm.graph.nodes)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", SCALED)
def test_layer_scale_is_folded(name: str, product: str) -> None:
    layer, shape, size = SCALED[name]
    model = Scaled(layer(), shape, PRODUCTS[product])
    x = torch.randn(size, dtype=torch.float64)
    gm, expected = traced(model, x)
    weights = copy.deepcopy(model.state_dict())
    assert fold_layer_scale(gm)
    gm.graph.lint()
    assert multiplications(gm) == 0
    assert not gm.graph.find_nodes(op="get_attr", target="gamma")
    assert_close(gm(x), expected)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert not fold_layer_scale(gm)


class ReadTwice(Scaled):
    """Something besides the product reads the layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * self.gamma + y


class CalledTwice(Scaled):
    """The layer is called twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x) * self.gamma)


class WritesScale(Scaled):
    """The factors change in each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) * self.gamma
        with torch.no_grad():
            self.gamma.add_(1)
        return y


class ScaleOfSamples(Scaled):
    """The factors are of the first dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).transpose(0, 1) * self.gamma


@pytest.mark.parametrize("kind", [ReadTwice, CalledTwice, WritesScale, ScaleOfSamples])
def test_layer_scale_is_left_alone(kind: type[Scaled]) -> None:
    model = kind(nn.Linear(6, 6), (6,), torch.mul)
    x = torch.randn(6, 6, dtype=torch.float64)
    before = copy.deepcopy(model)
    gm, _ = traced(model, x)
    assert not fold_layer_scale(gm)
    if kind is not WritesScale:
        assert_close(gm(x), before.double()(x))


@pytest.mark.parametrize("shape", [(), (1,), (5, 6), (2, 1, 6)])
def test_factors_of_another_form_are_left_alone(shape: tuple[int, ...]) -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    gm, expected = traced(Scaled(nn.Linear(6, 6), shape, torch.mul), x)
    assert not fold_layer_scale(gm)
    assert_close(gm(x), expected)


class UnderAutocast(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_a_product_of_another_dtype_than_that_of_the_layer_is_left_alone() -> None:
    model, x = UnderAutocast(nn.Linear(6, 6), (6,), torch.mul).eval(), torch.rand(2, 6)
    gm = trace(model, x)
    assert not fold_layer_scale(gm)
    assert torch.equal(gm(x), model(x))


def test_complex_factors_are_left_alone() -> None:
    model = Scaled(nn.Linear(6, 6, dtype=torch.complex64), (6,), torch.mul).eval()
    model.gamma = nn.Parameter(torch.randn(6, dtype=torch.complex64))
    x = torch.randn(2, 6, dtype=torch.complex64)
    gm = trace(model, x)
    assert not fold_layer_scale(gm)
    assert torch.equal(gm(x), model(x))


def test_a_layer_with_a_hook_is_left_alone() -> None:
    layer = nn.Linear(6, 6)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    x = torch.randn(2, 6, dtype=torch.float64)
    gm, expected = traced(Scaled(layer, (6,), torch.mul), x)
    assert not fold_layer_scale(gm)
    assert_close(gm(x), expected)


def test_norms_are_no_layers() -> None:
    x = torch.randn(2, 6, dtype=torch.float64)
    gm, expected = traced(Scaled(nn.LayerNorm(6), (6,), torch.mul), x)
    assert not fold_layer_scale(gm)
    assert_close(gm(x), expected)


# -- linear layers of one input ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Query, key and value of one input."""

    def __init__(self, *, bias: bool = True, sizes: tuple[int, int, int] = (8, 8, 4)) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, size, bias=bias) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        q = q.view(*q.shape[:-1], 2, -1).flatten(-2)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_are_merged(bias: bool) -> None:
    model = Attention(bias=bias)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    gm, expected = traced(model, x)
    weights = copy.deepcopy(model.state_dict())
    assert merge_parallel_linears(gm)
    gm.graph.lint()
    layers = [module for module in gm.modules() if isinstance(module, nn.Linear)]
    assert [layer.weight.shape for layer in layers] == [(20, 6)]
    assert layers[0].out_features == 20
    assert_close(gm(x), expected)
    longer = torch.randn(3, 9, 6, dtype=torch.float64)
    assert_close(gm(longer), model(longer))
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert not merge_parallel_linears(gm)


STRIDED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "joins dimensions": (lambda box: box.view(-1, 4), True),
    "joins those of a view": (lambda box: box.unsqueeze(1).view(-1, 4), True),
    "reads memory": (lambda box: torch.as_strided(box, (2, 2), (4, 1)), False),
    "asks": (lambda box: box.stride(0) * box, False),
    "an overload": (lambda box: torch.ops.aten.view.default(box, [-1, 4]), False),
}


@pytest.mark.parametrize("name", STRIDED)
def test_results_whose_strides_code_depends_on(name: str) -> None:
    function, is_merged = STRIDED[name]

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.box = nn.Linear(6, 3), nn.Linear(6, 12)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.score(x), function(self.box(x))

    gm, x = symbolic_trace(Heads().eval()), torch.rand(5, 6)
    expected = gm(x)
    assert merge_parallel_linears(gm) is is_merged
    gm.graph.lint()
    assert all(map(torch.allclose, gm(x), expected))


def test_gradients_reach_the_input_and_the_merged_layer() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    gm, expected = traced(Attention(), x)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    assert merge_parallel_linears(gm)
    gm(x).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, wanted)
    assert all(parameter.grad is not None for parameter in gm.parameters())


def test_frozen_linear_layers_stay_frozen() -> None:
    torch.manual_seed(0)
    model = Attention().eval()
    model.query.requires_grad_(False)
    gm = trace(model, torch.rand(2, 3, 6))
    assert merge_parallel_linears(gm)  # the others
    assert {name for name, weight in gm.named_parameters() if not weight.requires_grad} == {
        "query.weight",
        "query.bias",
    }


def test_linear_layers_whose_results_are_written_are_left_alone() -> None:
    class WritesResults(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.query(x).relu_() + self.key(x).relu_()

    gm = symbolic_trace(WritesResults())
    x = torch.rand(2, 6)
    expected = gm(x)
    merge_parallel_linears(gm)
    assert torch.equal(gm(x), expected)


class WritesInput(Attention):
    """The input changes between two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        q = self.query(x)
        x.add_(1)
        return q + self.key(x)


class OneTwice(Attention):
    """One layer is called twice; there is no other one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) + self.query(x)


class Norm(Attention):
    """One of two layers is written by the model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.key.weight.mul_(0.5)
        return self.query(x) + self.key(x)


@pytest.mark.parametrize("kind", [WritesInput, OneTwice, Norm])
def test_linear_layers_are_left_alone(kind: type[Attention]) -> None:
    model = kind()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    before = copy.deepcopy(model).double()
    gm, _ = traced(model, x)
    model.load_state_dict(before.state_dict())
    assert not merge_parallel_linears(gm)
    assert_close(gm(x), before(x))


# -- Identity ----------------------------------------------------------------------------------------------------------


def test_identity_is_removed() -> None:
    x = torch.randn(2, 6, dtype=torch.float64)
    gm, expected = traced(nn.Sequential(nn.Identity(), nn.Linear(6, 6), nn.Identity(), nn.Identity()), x)
    assert remove_identity(gm)
    assert [node.target for node in gm.graph.find_nodes(op="call_module")] == ["1"]
    assert_close(gm(x), expected)
    assert not remove_identity(gm)


def test_identity_with_a_hook_stays() -> None:
    identity = nn.Identity()
    identity.register_forward_hook(lambda module, args, output: output * 2)
    x = torch.randn(2, 6, dtype=torch.float64)
    gm, expected = traced(nn.Sequential(identity, nn.ReLU()), x)
    assert not remove_identity(gm)
    assert_close(gm(x), expected)


def test_identity_that_is_the_result_of_the_input() -> None:
    gm = trace(nn.Sequential(nn.Identity()), torch.ones(2))
    assert remove_identity(gm)
    x = torch.randn(2)
    assert gm(x) is x
