"""Tracer: a module or function becomes the graph that torch.fx makes of it, where that one is right."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from small_models import Residual, Scaled
from sources import run_source
from torch import nn
from torch.nn import functional

import featx

Rows = Callable[[Any], list[str]]
timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


# -- the same graphs as torch.fx ---------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One module under two names, one parameter under two names, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()
        self.second = self.first
        self.linear = nn.Linear(4, 4)
        self.linear.weight = self.first.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(self.second(self.first(x)))) + self.linear.weight.sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels = x.shape
        query, key, value = self.qkv(x).reshape(batch, 3, channels).unbind(1)
        weights = (query @ key.transpose(-2, -1) * channels**-0.5).softmax(dim=-1)
        return functional.dropout(weights, 0.0, self.training) @ value


class ManyKinds(nn.Module):
    def forward(self, x: torch.Tensor, *, flag: bool = True) -> Any:
        y = torch.zeros((x.shape[0], 3), dtype=torch.float32, device=x.device)
        z = x.new_zeros((x.size(0), 1)).expand(-1, 2)
        return [torch.cat((y, z), dim=1), (x[:, 1:], x[..., None]), {"shape": x.shape}]


SMALL = [Scaled, Residual, Shared, Attention, ManyKinds]


@pytest.mark.parametrize("kind", SMALL)
def test_small_model_has_the_graph_of_torch_fx(kind: Callable[[], nn.Module], rows: Rows) -> None:
    model = kind()
    assert rows(featx.Tracer().trace(model)) == rows(torch.fx.Tracer().trace(model))


@pytest.mark.parametrize("kind", [Scaled, Residual, Shared, Attention])
def test_small_model_gives_its_own_values(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    torch.testing.assert_close(featx.symbolic_trace(model)(X), model(X), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "swin_t", "densenet121", "mobilenet_v3_small"])
def test_torchvision_model_has_the_graph_of_torch_fx(name: str, training: bool, rows: Rows) -> None:
    with torch.device("meta"):
        model = getattr(torchvision.models, name)().train(training)
    assert rows(featx.Tracer().trace(model)) == rows(torch.fx.Tracer().trace(model))


@pytest.mark.slow
def test_googlenet_has_the_graph_of_torch_fx_in_eval_mode(rows: Rows) -> None:
    with torch.device("meta"):
        model = torchvision.models.googlenet(init_weights=False).eval()
    assert rows(featx.Tracer().trace(model)) == rows(torch.fx.Tracer().trace(model))


def test_googlenet_has_the_graph_of_torch_fx_in_train_mode_but_for_its_named_tuple(rows: Rows) -> None:
    # torch.fx makes a node of the named tuple that is returned; here it is a literal of the output.
    with torch.device("meta"):
        model = torchvision.models.googlenet(init_weights=False).train()
    ours, theirs = featx.Tracer().trace(model), torch.fx.Tracer().trace(model)
    assert rows(ours)[:-1] == rows(theirs)[:-2]
    assert type(ours.output_node().args[0]) is torchvision.models.GoogLeNetOutputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto", "mixer_s32_224", "resmlp_12_224", "poolformer_s12"]
)
def test_timm_model_has_the_graph_of_torch_fx(name: str, rows: Rows) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert rows(featx.Tracer().trace(model)) == rows(torch.fx.Tracer().trace(model))


def test_parametrized_module_is_traced_through_its_parametrization() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    outer = nn.Sequential(model)
    torch.testing.assert_close(featx.symbolic_trace(outer)(X), outer(X), rtol=0, atol=0)


def test_own_parametrization_is_traced_through() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    class Model(Scaled):
        pass

    model = Model()
    nn.utils.parametrize.register_parametrization(model, "weight", Doubled())
    traced = featx.symbolic_trace(model)
    torch.testing.assert_close(traced(X), model(X), rtol=0, atol=0)
    with torch.no_grad():
        model.parametrizations.weight.original.fill_(3.0)
    torch.testing.assert_close(traced(X), model(X), rtol=0, atol=0)


def test_graph_module_is_traced_again_into_the_same_graph(rows: Rows) -> None:
    traced = featx.symbolic_trace(Residual())
    again = featx.symbolic_trace(traced)
    assert rows(again.graph) == rows(traced.graph)
    torch.testing.assert_close(again(X), traced(X), rtol=0, atol=0)


def test_graph_module_inside_a_model_is_traced_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = featx.symbolic_trace(Scaled())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    model = Wrapper()
    traced = featx.symbolic_trace(model)
    assert traced.graph.find_nodes(op="call_module", target="inner.linear")
    torch.testing.assert_close(traced(X), model(X), rtol=0, atol=0)


def test_graph_module_of_torch_fx_can_be_traced() -> None:
    model = Scaled()
    traced = featx.symbolic_trace(torch.fx.symbolic_trace(model))
    torch.testing.assert_close(traced(X), model(X), rtol=0, atol=0)


def test_scripted_submodule_is_one_node() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that scripting is deprecated
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    expected = model(X)
    traced = featx.symbolic_trace(model)
    assert traced.graph.find_nodes(op="call_module", target="1")
    assert torch.equal(traced(X), expected)
    assert not [module for module in model.modules() if "_call_impl" in module.__dict__]
    assert torch.equal(model(X), expected)


class Hidden(nn.Module):
    """Keeps a module where torch does not see it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.layers = [module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


@pytest.mark.parametrize("kind", [Scaled, lambda: nn.Linear(4, 4)], ids=["own", "leaf"])
def test_module_that_is_only_in_a_plain_list_is_refused(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(featx.ModulePathError, match="ModuleList") as caught:
        featx.symbolic_trace(Hidden(kind()))
    assert isinstance(caught.value, NameError)


def test_module_as_an_argument_is_read_from_the_model() -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return run(self.linear, x)

    model = Passing()
    graph = featx.Tracer(autowrap_functions=(run,)).trace(model)
    torch.testing.assert_close(featx.GraphModule(model, graph)(X), model(X), rtol=0, atol=0)


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def test_parameter_that_is_read_twice_is_one_node() -> None:
    assert len(featx.Tracer().trace(Scaled()).find_nodes(op="get_attr", target="weight")) == 1


# -- factories ---------------------------------------------------------------------------------------------------------

FACTORIES: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda x: torch.zeros(x.shape[0]),
    "zeros of a tuple": lambda x: torch.zeros((x.shape[0], 2), dtype=torch.long),
    "ones": lambda x: torch.ones((x.size(0), x.size(1))),
    "ones with a number first": lambda x: torch.ones(3, x.size(1)),
    "ones by keyword": lambda x: torch.ones(size=(x.shape[0],)),
    "full": lambda x: torch.full((x.shape[0],), 2.5),
    "full with a traced value": lambda x: torch.full((3,), x.shape[0]),
    "arange": lambda x: torch.arange(x.shape[0], device=x.device),
    "arange with a start": lambda x: torch.arange(1, x.shape[0] + 1, 1),
    "linspace": lambda x: torch.linspace(0, 1, x.shape[0]),
    "eye": lambda x: torch.eye(x.shape[0]),
    "tensor": lambda x: torch.tensor([x.shape[0], x.shape[1]]),
    "as_tensor": lambda x: torch.as_tensor(x.shape[0]),
    "scalar_tensor": lambda x: torch.scalar_tensor(x.shape[0]),
    "tril_indices": lambda x: torch.tril_indices(x.shape[0], x.shape[0]),
    "zeros_like": lambda x: torch.zeros_like(x),
    "full_like": lambda x: torch.full_like(x, 3.0),
    "new_full": lambda x: x.new_full((x.shape[0],), 1.5),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "empty and fill": lambda x: torch.empty(x.shape[0]).fill_(1.0),
    "meshgrid": lambda x: torch.meshgrid(torch.arange(x.shape[0]), torch.arange(3), indexing="ij")[0],
    "one_hot": lambda x: functional.one_hot(torch.arange(x.shape[0]), 8),
    "rand": lambda x: torch.rand(x.shape[0]),
    "randn": lambda x: torch.randn((x.shape[0], 2)),
    "randint": lambda x: torch.randint(0, 5, (x.shape[0],)),
    "randperm": lambda x: torch.randperm(x.shape[0]),
    "triu of ones": lambda x: torch.ones((x.shape[0], x.shape[0])).triu(1).bool(),
    "window": lambda x: torch.hann_window(x.shape[0]),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_gives_what_eager_gives_at_another_batch_size(name: str) -> None:
    function = FACTORIES[name]
    traced = featx.symbolic_trace(function)
    for batch in (2, 5):
        x = torch.ones(batch, 3)
        torch.manual_seed(0)
        result = traced(x)
        torch.manual_seed(0)
        expected = function(x)
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.zeros(x.shape[0], 3),
        lambda x: torch.ones(x.shape[0], x.shape[1]),
        lambda x: torch.rand(x.size(0), 2),
    ],
)
def test_factory_with_several_sizes_is_right_or_refused_with_advice(function: Callable[[Any], Any]) -> None:
    # torch's own argument parser wants a number first, and says that there are too many arguments.
    try:
        traced = featx.symbolic_trace(function)
    except featx.TraceError:
        return
    assert traced(torch.ones(5, 3)).shape[0] == 5


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_hooks_on_leaf_modules_run_once_for_each_run_and_never_during_the_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append("pre"))
    model[0].register_forward_hook(lambda module, args, output: seen.append("post"))
    traced = featx.symbolic_trace(model)
    assert seen == []
    traced(X)
    assert seen == ["pre", "post"]


def test_hook_on_a_leaf_module_changes_the_value_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, output: output * 2 + 1)
    torch.testing.assert_close(featx.symbolic_trace(model)(X), model(X), rtol=0, atol=0)


def test_hook_on_a_module_that_is_traced_through_becomes_part_of_the_graph_once() -> None:
    model = Residual()
    model.block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.block.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(featx.symbolic_trace(model)(X), model(X), rtol=0, atol=0)


# -- errors and what is left behind ------------------------------------------------------------------------------------


def test_error_of_the_model_itself_comes_through() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("the model's own")

    with pytest.raises(ZeroDivisionError, match="the model's own"):
        featx.symbolic_trace(Broken())


@pytest.mark.parametrize("kind", SMALL)
def test_model_is_as_before_after_a_trace(kind: Callable[[], nn.Module], snapshot: Callable[[nn.Module], Any]) -> None:
    model = kind()
    next(model.modules()).eval()
    for child in model.children():
        child.train()
    before = snapshot(model)
    featx.symbolic_trace(model)
    before.check()


def test_model_is_as_before_after_a_failing_trace(snapshot: Callable[[nn.Module], Any]) -> None:
    class Failing(Residual):
        def forward(self, x: torch.Tensor) -> Any:
            result = super().forward(x)
            return result if x.sum() > 0 else None

    model = Failing()
    model.block[0].register_forward_hook(lambda module, args, output: None)
    before = snapshot(model)
    with pytest.raises(featx.ControlFlowError):
        featx.symbolic_trace(model)
    before.check()


def test_model_works_and_copies_after_a_trace() -> None:
    model = Residual()
    expected = model(X)
    featx.symbolic_trace(model)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(X), expected, rtol=0, atol=0)


def test_traced_module_shares_the_weights() -> None:
    model = Scaled()
    traced = featx.symbolic_trace(model)
    assert traced.weight is model.weight
    assert traced.linear is model.linear


def test_training_mode_of_the_model_decides_what_is_traced() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if self.training else x - 1

    model = Noisy()
    assert torch.equal(featx.symbolic_trace(model)(X), X + 1)
    assert torch.equal(featx.symbolic_trace(model.eval())(X), X - 1)


def test_refusal_that_the_model_swallows_is_raised_all_the_same() -> None:
    def function(x: Any) -> Any:
        try:
            count = int(x.shape[0])
        except TypeError:
            count = 7
        return x * count

    with pytest.raises(featx.ControlFlowError, match=r"int\(x\.shape\[0\]\)"):
        featx.symbolic_trace(function)


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor, (int, torch.Tensor)], ids=str)
def test_parameter_of_the_model_is_a_parameter_and_a_tensor(kind: Any) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(self.weight, kind):
                return x * self.weight + 1
            return x

    model = Asking()
    assert torch.equal(featx.symbolic_trace(model)(X), model(X))


def test_lists_and_dicts_of_parameters_are_read_item_by_item() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.ParameterList([torch.ones(4), torch.ones(4) * 2])
            self.named = nn.ParameterDict({"bias": torch.ones(4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for item in self.items:
                x = x * item
            return x + self.named["bias"] + dict(self.named_parameters())["items.0"]

    model = Listing()
    traced = featx.symbolic_trace(model)
    with torch.no_grad():
        model.items[0].fill_(5)
    assert torch.equal(traced(X), model(X))


def test_two_modules_of_one_path_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    setattr(model, "0.0", nn.Linear(4, 4))
    with pytest.raises(featx.TraceError, match=r"two modules have the path '0\.0'"):
        featx.symbolic_trace(model)


ELSEWHERE = run_source("""
import torch

def add(x):
    return x + torch.zeros(x.shape[0], 1)
""")
add = ELSEWHERE["add"]


def test_factory_in_another_file_takes_sizes_that_are_traced() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return add(x)

    graph_module = featx.symbolic_trace(Adds())
    for count in (1, 5):
        x = torch.rand(count, 4)
        assert torch.equal(graph_module(x), x)
