"""Functions that run functions: checkpoints give their values and gradients, what torch.func maps stays whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, agree_with_gradients, gradients, image, run, same
from small_models import Computing
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import featx

Compute = Callable[[Any, torch.Tensor], Any]


# -- checkpoints -------------------------------------------------------------------------------------------------------


CHECKPOINTED: dict[str, Compute] = {
    "module": lambda model, x: checkpoint(model.linear, x, use_reentrant=False) + 1,
    "function": lambda model, x: checkpoint(lambda y: model.linear(y) * model.linear.bias, x, use_reentrant=False),
    "draw": lambda model, x: checkpoint(lambda y: functional.dropout(model.linear(y)), x, use_reentrant=False) + 1,
    "sequence": lambda model, x: checkpoint_sequential(model.inner, 2, model.linear(x), use_reentrant=False) + 1,
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpoint_gives_its_value_and_gradient(name: str) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.5))
    agree_with_gradients(Computing(CHECKPOINTED[name], inner))


class Checkpointing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x, use_reentrant=True) * 2


def test_reentrant_checkpoint_of_a_module_that_stays_whole_gives_its_value_and_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Checkpointing(), nn.Linear(4, 4))
    extractor = featx.create_feature_extractor(model, ["2"], example_inputs=image())
    assert same(run(extractor, image(5))["2"], run(model, image(5)))
    assert same(gradients(lambda x: extractor(x)["2"], model, image(5)), gradients(model, model, image(5)))


# -- functions of functions --------------------------------------------------------------------------------------------


class Mapped(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class HasMapped(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mapped = Mapped(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mapped(self.linear(x)) + 1


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return (x**2).sum()


MAPPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "vmap": torch.vmap(lambda row: row * row.sum()),
    "func.vmap": torch.func.vmap(lambda row: row.cumsum(0), in_dims=1, out_dims=1),
    "grad": torch.func.grad(sum_of_squares),
    "jacobian": lambda x: torch.func.jacrev(torch.sin)(x).sum((0, 1)),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "grad of rows": torch.vmap(torch.func.grad(sum_of_squares)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPPED)
def test_submodule_that_cannot_be_followed_is_kept_whole(name: str) -> None:
    model = HasMapped(MAPPED[name])
    traced = agree_with_gradients(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["linear", "mapped"]
    assert isinstance(traced.mapped, Mapped)
    extractor = featx.create_feature_extractor(model, ["mapped", "add"], example_inputs=image())
    assert same(extractor(image()), {"mapped": model.mapped(model.linear(image())), "add": model(image())})


@pytest.mark.parametrize("name", MAPPED)
def test_model_that_cannot_be_followed_itself_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(featx.TraceError, match=r"a function of torch\.func .*test_example_functionals\.py"):
        featx.trace(Mapped(MAPPED[name]), image())


def test_gradient_inside_forward_is_computed_in_each_call() -> None:
    def gradient(model: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad(model.linear(y).square().sum(), y)[0] * 2

    agree(Computing(gradient), (image(),), (image(5, seed=2),))


class Hypernetwork(nn.Module):
    """Runs a submodule on weights that another one computes."""

    def __init__(self, base: nn.Module, path: str) -> None:
        super().__init__()
        self.base, self.path, self.weights = base, path, nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights(x.mean(0)).view(4, 4)
        return torch.func.functional_call(self.base, {self.path: weight}, (x,)) + self.base(x)


@pytest.mark.parametrize(
    ("base", "path"),
    [(nn.Linear(4, 4), "weight"), (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "2.weight")],
    ids=["layer", "layers"],
)
def test_modules_run_on_weights_that_forward_computes(base: nn.Module, path: str) -> None:
    model, x = Hypernetwork(base, path).eval(), torch.rand(3, 4)
    extractor = featx.create_feature_extractor(model, ["weights", "base", "output"], example_inputs=x)
    for inputs in (x, torch.rand(5, 4)):
        found = extractor(inputs)
        assert torch.equal(found["output"], model(inputs))
        assert torch.equal(found["base"], base(inputs))
        assert torch.equal(found["weights"], model.weights(inputs.mean(0)))


class FirstOutput(nn.Module):
    """Runs a recurrent layer, and returns its outputs."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class OnScaledWeights(nn.Module):
    """Runs a submodule on its weights, and on these scaled."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: value * 0.5 for name, value in self.base.named_parameters()}
        return self.base(x) + torch.func.functional_call(self.base, weights, (x,))


RECURRENT = {
    "LSTM": lambda: nn.LSTM(4, 4),
    "GRU": lambda: nn.GRU(4, 4, num_layers=2, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 4, batch_first=True),
}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("training", [False, True])
def test_recurrent_layers_run_on_weights_that_forward_computes(kind: str, training: bool) -> None:
    model = OnScaledWeights(FirstOutput(RECURRENT[kind]())).train(training)
    x = torch.rand(3, 2, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    traced = featx.trace(model, x)
    for inputs in (x, torch.rand(5, 2, 4)):
        assert torch.equal(extractor(inputs)["output"], model(inputs))
        assert torch.equal(traced(inputs), model(inputs))


def test_recurrent_layer_whose_list_of_weights_the_model_sets_is_refused() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer._flat_weights = [weight * 0.5 for weight in self.layer._flat_weights]
            return self.layer(x)[0]

    with pytest.raises(featx.TraceError, match="_flat_weights"):
        featx.trace(Dropping(), torch.rand(3, 2, 4))


class DropsWeights(nn.Module):
    """Sets an item of the list of weights of a recurrent layer, as some variants of WeightDrop do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4)
        self.raw = nn.Parameter(self.layer.weight_hh_l0.detach() * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer._flat_weights[1] = functional.dropout(self.raw, 0.5, self.training)
        return self.layer(x)[0]


@pytest.mark.parametrize("training", [False, True])
def test_item_of_the_list_of_weights_that_the_model_sets_is_noticed(training: bool) -> None:
    model, x = nn.Sequential(DropsWeights(), nn.Linear(4, 4)).train(training), torch.rand(3, 2, 4)
    traced = featx.trace(model, x)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    assert torch.equal(traced(x), expected)
    with pytest.raises(featx.TraceError, match="_flat_weights"):
        featx.create_feature_extractor(model, ["0.dropout", "0.layer"], example_inputs=x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "parametrize", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_recurrent_layers_with_parametrizations_are_one_node(parametrize: Callable[..., Any], training: bool) -> None:
    x, pair = torch.rand(3, 2, 4), []
    for _ in range(2):
        torch.manual_seed(0)
        pair.append(FirstOutput(parametrize(nn.LSTM(4, 4), "weight_hh_l0")).train(training))
    model, twin = pair
    names = featx.get_graph_node_names(model, example_inputs=x)
    assert names == (["x", "layer", "getitem"], ["x", "layer", "getitem"])
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    for _ in range(2):
        assert torch.equal(extractor(x)["output"], twin(x))
    assert all(map(torch.equal, model.buffers(), twin.buffers()))


class Drawing(nn.Linear):
    """Cannot be looked into, and is kept whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + random.random() * 0


def test_module_that_cannot_be_looked_into_is_refused_on_other_weights() -> None:
    with pytest.raises(featx.TraceError, match=r"of or inside 'base', which is kept whole"):
        featx.trace(OnScaledWeights(Drawing(4, 4)), torch.rand(3, 4))


def test_name_of_an_operation_on_other_weights_means_the_same_alone() -> None:
    model, x = OnScaledWeights(nn.Linear(4, 4)).eval(), torch.rand(3, 4)
    expected = nn.functional.linear(x, model.base.weight * 0.5, model.base.bias * 0.5)  # type: ignore[union-attr]
    for names in (["base", "base.linear"], ["base.linear"]):
        found = featx.create_feature_extractor(model, names, example_inputs=x)(x)
        assert torch.equal(found["base.linear"], expected)


LAYERS = {
    "dropout": lambda: nn.Dropout(),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "instance norm": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
}


class CallsForward(nn.Module):
    """Calls a layer by its `forward`, of the object or of the class."""

    def __init__(self, layer: nn.Module, by_class: bool) -> None:
        super().__init__()
        self.layer, self.by_class = layer, by_class

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return type(self.layer).forward(self.layer, x) if self.by_class else self.layer.forward(x)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_mode_of_a_layer_whose_forward_is_called_is_checked(kind: str, by_class: bool, training: bool) -> None:
    x = torch.rand(3, 4, 5) if kind == "instance norm" else torch.rand(3, 4)
    traced = featx.trace(CallsForward(LAYERS[kind](), by_class).train(training), x)
    traced(x)
    with pytest.raises(featx.SpecializationError, match="a model has a graph for each mode"):
        traced.train(not training)(x)
