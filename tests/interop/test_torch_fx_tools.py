"""What is made for torch.fx.GraphModule takes what to_torch_fx returns, and what comes of it comes back to featx."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import subgraph_rewriter
from torch.fx.experimental import optimization
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.split_module import split_module

import featx

torchvision = pytest.importorskip("torchvision")

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """Convolutions with batch norms, a branch on a size, a literal tensor, a write in place, a region without grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mean", torch.rand(3, 1, 1))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, torch.Tensor]:
        if x.shape[1] != 3:
            raise ValueError("three channels, please")
        x = (x - self.mean) / torch.tensor([[[1.0]], [[2.0]], [[3.0]]])
        y = self.first(x)
        z = self.second(y)
        z += y
        with torch.no_grad():
            target = z.mean(dim=(2, 3))
        return {"features": torch.relu(self.drop(z)) * scale, "target": target}


class Plain(Residual):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        y = self.first((x - self.mean) * scale)
        return torch.relu(self.drop(self.second(y) + y))


CASES: dict[str, tuple[type[nn.Module], Callable[[nn.Module], featx.GraphModule]]] = {
    "symbolic": (Plain, featx.symbolic_trace),
    "example": (Plain, lambda model: featx.trace(model, IMAGE)),
    "example with decisions": (Residual, lambda model: featx.trace(model, IMAGE)),
}


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    model = CASES[request.param][0]()
    model(IMAGE)  # so that the statistics are not those of a new module
    return model.eval()


@pytest.fixture
def converted(model: nn.Module, request: pytest.FixtureRequest) -> torch.fx.GraphModule:
    """What to_torch_fx makes of `model`, traced in one way or another."""
    return featx.to_torch_fx(CASES[request.node.callspec.params["model"]][1](model))


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_shape_prop_knows_what_ran(converted: torch.fx.GraphModule, model: nn.Module) -> None:
    assert_equal(ShapeProp(converted).propagate(IMAGE), model(IMAGE))
    back = featx.from_torch_fx(converted)
    reached = [node for node in back.graph.nodes if "tensor_meta" in node.meta]
    assert len(reached) > 8
    convolution = back.graph.find_nodes(op="call_module", target="first.0")[0]
    assert convolution.meta["tensor_meta"].shape == (2, 4, 32, 32)


def test_fake_tensor_prop_runs(converted: torch.fx.GraphModule, model: nn.Module) -> None:
    FakeTensorProp(converted, FakeTensorMode(allow_non_fake_inputs=True)).propagate(IMAGE)
    convolution = featx.from_torch_fx(converted).graph.find_nodes(op="call_module", target="first.0")[0]
    assert convolution.meta["val"].shape == (2, 4, 32, 32)


def test_interpreter_and_transformer_run(converted: torch.fx.GraphModule, model: nn.Module, assert_same: Any) -> None:
    expected = model(IMAGE)
    assert_equal(torch.fx.Interpreter(converted).run(IMAGE), expected)
    transformed = torch.fx.Transformer(converted).transform()
    assert_equal(transformed(IMAGE), expected)
    assert_equal(featx.from_torch_fx(transformed)(IMAGE), expected)


@pytest.mark.parametrize("no_trace", [True, False])
def test_fuse_fuses(converted: torch.fx.GraphModule, model: nn.Module, no_trace: bool) -> None:
    fused = optimization.fuse(converted, no_trace=no_trace)
    expected = optimization.fuse(torch.fx.symbolic_trace(Plain().eval())) if type(model) is Plain else None
    modules = {type(part) for part in fused.modules()}
    assert nn.BatchNorm2d not in modules
    torch.testing.assert_close(fused(IMAGE), model(IMAGE), rtol=1e-4, atol=1e-5)
    back = featx.from_torch_fx(fused)
    assert_equal(back(IMAGE), fused(IMAGE))
    if expected is not None:
        calls = [[n.target for n in one.graph.nodes if n.op == "call_module"] for one in (back, expected)]
        assert calls[0] == calls[1]
    assert any(isinstance(part, nn.BatchNorm2d) for part in model.modules()), "the model stays as it is"


def test_dropouts_are_removed() -> None:
    model = Plain().train()
    converted = featx.to_torch_fx(featx.symbolic_trace(model))
    removed = optimization.remove_dropout(converted)
    assert not any(isinstance(part, nn.Dropout) for part in removed.modules())
    assert_equal(removed.eval()(IMAGE), model.eval()(IMAGE))


def test_patterns_are_replaced(converted: torch.fx.GraphModule, model: nn.Module) -> None:
    matches = subgraph_rewriter.replace_pattern(
        converted,
        lambda x: torch.relu(x),
        lambda x: torch.clamp(x, min=0),
    )
    assert len(matches) == 1
    assert "clamp" in converted.code
    assert "relu(" not in converted.code
    assert_equal(converted(IMAGE), model(IMAGE))
    assert_equal(featx.from_torch_fx(converted)(IMAGE), model(IMAGE))


def test_module_is_split_in_two() -> None:
    model = Plain().eval()
    converted = featx.to_torch_fx(featx.trace(model, IMAGE))
    second = converted.graph.find_nodes(op="call_module", target="second.0")[0]
    parts = split_module(converted, model, lambda node: int(node >= second))
    assert_equal(parts(IMAGE), model(IMAGE))
    back = featx.from_torch_fx(parts)
    assert_equal(back(IMAGE), model(IMAGE))
    assert [node.target for node in back.graph.find_nodes(op="call_module")] == ["submod_0", "submod_1"]
    assert back.submod_0 is parts.submod_0


def test_copies_compute_the_same(converted: torch.fx.GraphModule, model: nn.Module) -> None:
    copied = copy.deepcopy(converted)
    copied.graph.lint()
    assert copied.get_submodule("second.0").weight is not model.second[0].weight
    assert_equal(copied(IMAGE), model(IMAGE))
    assert_equal(copy.copy(converted)(IMAGE), model(IMAGE))


@pytest.mark.slow
def test_module_compiles_whole(converted: torch.fx.GraphModule, model: nn.Module) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(converted, fullgraph=True, backend="eager")
    assert_equal(compiled(IMAGE), model(IMAGE))
    torch._dynamo.reset()


def test_module_is_exported() -> None:
    model = Residual().eval()
    converted = featx.to_torch_fx(featx.trace(model, IMAGE))
    program = torch.export.export(converted, (IMAGE,))
    assert_equal(program.module()(IMAGE), model(IMAGE))


@pytest.mark.slow
def test_featx_is_a_backend_of_the_compiler() -> None:
    model = Residual().eval()
    seen: list[featx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.append(featx.from_torch_fx(module))
        return seen[-1]

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_equal(compiled(IMAGE), model(IMAGE))
    assert len(seen) == 1
    torch._dynamo.reset()


def test_graph_of_operators_is_taken(assert_same: Any) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def forward(x: torch.Tensor) -> Any:
        y = torch.sin(x) @ x.transpose(0, 1)
        y[0] = 1
        return {"y": y.view(-1)[1:3], "x": x.relu()}

    x = torch.randn(3, 4)
    traced = make_fx(forward)(x)
    converted = featx.from_torch_fx(traced)
    assert_same(traced.graph, converted.graph)
    assert_equal(converted(x), forward(x))
    assert featx.to_torch_fx(converted).code == traced.code


def test_dead_code_that_torch_fx_removes_is_gone() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.call_function(operator.mul, (x, torch.ones(1)))
    graph.output(graph.call_method("neg", (x,)))
    converted = featx.to_torch_fx(featx.GraphModule(nn.Module(), graph))
    assert converted.graph.eliminate_dead_code()
    assert [node.name for node in featx.from_torch_fx(converted).graph.nodes] == ["x", "neg", "output"]


def test_helper_node_that_somebody_changes_is_a_node() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    length = graph.call_function(len, (x,))
    graph.output((graph.call_function(operator.iadd, (length, 1)), length))
    converted = featx.to_torch_fx(featx.GraphModule(nn.Module(), graph))
    helper = converted.graph.find_nodes(op="call_function", target=operator.getitem)[0]
    helper.args = ((5, 6), 1)
    converted.recompile()
    assert converted(IMAGE) == (7, 2)
    back = featx.from_torch_fx(converted)
    assert back(IMAGE) == (7, 2)
    assert "featx_helper" not in back.graph.find_nodes(op="call_function", target=operator.getitem)[0].meta
