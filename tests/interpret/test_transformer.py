from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx
from featx import Graph, GraphModule, Transformer, symbolic_trace
from featx.errors import ArgumentTypeError, ModulePathError, TargetError

X = torch.tensor([[1.0, -2.0, 3.0]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.ReLU())
        self.scale = nn.Parameter(torch.rand(3))
        self.register_buffer("offset", torch.rand(3))

    def forward(
        self, x: torch.Tensor, weight: float = 2.0, *others: Any, bias: torch.Tensor | None = None, **more: Any
    ):
        y = torch.cat([self.block(x) * self.scale, x], dim=1)[:, 1:].clamp(min=0.25) + torch.arange(5.0)
        return {"y": y * weight, "offset": (self.offset, others[0], more["a"], bias)}


class ReluAndNeg(nn.Module):
    def forward(self, x: torch.Tensor):
        return torch.relu(x + 1).neg()


# -- the copy ---------------------------------------------------------------------------------------------------------


def test_transformer_that_changes_nothing_makes_an_equal_module() -> None:
    module = symbolic_trace(Model())
    module.meta["free_dims"] = "as before"
    copy = Transformer(module).transform()
    copy.graph.lint()
    assert type(copy) is GraphModule
    assert copy.code == module.code
    assert str(copy.graph) == str(module.graph)
    assert [node.meta for node in copy.graph.nodes] == [node.meta for node in module.graph.nodes]
    assert [node.type for node in copy.graph.nodes] == [node.type for node in module.graph.nodes]
    assert any(node.type is not None for node in copy.graph.nodes)
    assert copy.meta == module.meta
    assert copy.graph.tracer_cls is module.graph.tracer_cls is featx.Tracer
    assert str(copy) == str(module)
    args, kwargs = (X, 3.0, "other"), {"bias": 5, "a": 7}
    for one, other in zip(copy(*args, **kwargs).values(), module(*args, **kwargs).values(), strict=True):
        assert str(one) == str(other)


def test_copy_shares_modules_and_tensors_and_the_old_module_is_as_before() -> None:
    model = Model()
    module = symbolic_trace(model)
    state, edits, graph = dict(module.__dict__), module.graph.edits, str(module.graph)
    metas = [dict(node.meta) for node in module.graph.nodes]
    copy = Transformer(module).transform()
    copy.graph.find_nodes(op="call_module")[0].meta["mine"] = True
    assert copy.get_submodule("block.0") is model.block[0]
    assert copy.scale is model.scale
    assert copy.offset is model.offset
    assert copy.graph is not module.graph
    assert module.__dict__ == state
    assert (module.graph.edits, str(module.graph)) == (edits, graph)
    assert [node.meta for node in module.graph.nodes] == metas


def test_tensor_that_stands_in_the_graph_stays_there() -> None:
    module = symbolic_trace(lambda x: x + torch.ones(3))
    module = Transformer(Transformer(module).transform()).transform()
    assert [node.op for node in module.graph.nodes] == ["placeholder", "call_function", "output"]
    assert torch.equal(module(X), X + 1)
    moved = Transformer(module.to("meta")).transform()
    assert [node.op for node in moved.graph.nodes] == ["placeholder", "call_function", "output"]
    assert moved(X.to("meta")).is_meta


def test_transform_can_be_called_again_also_after_an_error() -> None:
    class Failing(Transformer):
        fails = True

        def call_method(self, target: Any, args: Any, kwargs: Any):
            if self.fails:
                raise NotImplementedError(target)
            return super().call_method(target, args, kwargs)

    transformer = Failing(symbolic_trace(ReluAndNeg()))
    with pytest.raises(NotImplementedError):
        transformer.transform()
    transformer.fails = False
    first, second = transformer.transform(), transformer.transform()
    assert first.code == second.code == symbolic_trace(ReluAndNeg()).code
    assert first.graph is not second.graph


def test_code_transformer_of_the_graph_goes_along() -> None:
    module = symbolic_trace(ReluAndNeg())
    module.graph.on_generate_code(lambda _: lambda body: ["# by hand\n", *body])
    assert "# by hand" in Transformer(module).transform().code


def test_graph_without_output_stays_without() -> None:
    graph = Graph()
    graph.call_function(print, (graph.placeholder("x"),))
    copy = Transformer(GraphModule(nn.Module(), graph)).transform()
    assert [node.op for node in copy.graph.nodes] == ["placeholder", "call_function"]


def test_output_of_none_stays() -> None:
    copy = Transformer(symbolic_trace(lambda x: None)).transform()
    assert copy(X) is None
    assert copy.graph.output_node().args == (None,)


def test_dual_module_is_transformed_in_its_present_mode() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor):
            return x + 1 if self.training else x * 10

    graphs = [featx.Tracer().trace(Branch().train(mode)) for mode in (True, False)]
    dual = featx.DualGraphModule(Branch().eval(), *graphs)
    assert torch.equal(Transformer(dual).transform()(X), X * 10)
    assert torch.equal(Transformer(dual.train()).transform()(X), X + 1)


def test_module_without_graph_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="Model has no featx graph"):
        Transformer(Model())  # type: ignore[arg-type]


# -- overriding -------------------------------------------------------------------------------------------------------


def test_call_function_and_call_method_say_what_takes_the_place_of_a_node() -> None:
    class Swapping(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            return torch.neg(*args, **kwargs) if target is torch.relu else super().call_function(target, args, kwargs)

        def call_method(self, target: Any, args: Any, kwargs: Any):
            return args[0].relu() if target == "neg" else super().call_method(target, args, kwargs)

    swapped = Swapping(symbolic_trace(ReluAndNeg())).transform()
    assert [node.target for node in swapped.graph.nodes] == ["x", operator.add, torch.neg, "relu", "output"]
    assert torch.equal(swapped(X), (-(X + 1)).relu())


def test_call_module_may_drop_a_node() -> None:
    class WithoutDropout(Transformer):
        def call_module(self, target: Any, args: Any, kwargs: Any):
            is_dropout = isinstance(self.submodules[target], nn.Dropout)
            return args[0] if is_dropout else super().call_module(target, args, kwargs)

    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.ReLU())
    module = WithoutDropout(symbolic_trace(block)).transform()
    assert [node.target for node in module.graph.nodes] == ["input", "0", "2", "output"]
    assert torch.equal(module(X), block.eval()(X))


def test_call_module_may_trace_through_a_module() -> None:
    class Opening(Transformer):
        def call_module(self, target: Any, args: Any, kwargs: Any):
            return self.fetch_attr(target)(*args, **kwargs)

    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    module = Opening(symbolic_trace(model)).transform()
    assert torch.equal(module(X), model(X))
    operations = [(node.op, node.target) for node in module.graph.nodes]
    assert ("call_function", functional.layer_norm) in operations
    attributes = {target for op, target in operations if op == "get_attr"}
    assert attributes == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert module.get_parameter("0.weight") is model[0].weight


def test_call_module_may_go_through_the_tracer_as_with_torch_fx() -> None:
    class ByTracer(Transformer):
        def call_module(self, target: Any, args: Any, kwargs: Any):
            submodule = self.fetch_attr(target)
            return self.tracer.call_module(submodule, submodule.forward, args, kwargs)

    module = symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    assert ByTracer(module).transform().code == module.code


def test_get_attr_may_be_replaced_by_a_new_constant() -> None:
    class Halving(Transformer):
        def get_attr(self, target: Any, args: Any, kwargs: Any):
            return super().get_attr(target, args, kwargs) * torch.tensor(0.5)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(3))

        def forward(self, x: torch.Tensor):
            return x * self.scale

    model = Scaled()
    assert torch.equal(Halving(symbolic_trace(model)).transform()(X), X * (model.scale * 0.5))


def test_placeholders_and_output_may_be_others() -> None:
    class Flat(Transformer):
        def __init__(self, module: GraphModule) -> None:
            super().__init__(module)
            self.inputs = [super(Flat, self).placeholder(f"input{index}", (), {}) for index in range(2)]
            self.next = iter(self.inputs)

        def placeholder(self, target: Any, args: Any, kwargs: Any):
            return next(self.next)

        def output(self, target: Any, args: Any, kwargs: Any):
            return super().output(target, ([args[0], *self.inputs],), {})

    module = Flat(symbolic_trace(ReluAndNeg())).transform()
    assert [node.target for node in module.graph.find_nodes(op="placeholder")] == ["input0", "input1"]
    result = module(X, "unused")
    assert torch.equal(result[0], ReluAndNeg()(X))
    assert result[1:] == [X, "unused"]


def test_run_node_may_be_overridden() -> None:
    names: list[str] = []

    class Watching(Transformer):
        def run_node(self, n: Any):
            names.append(n.name)
            return super().run_node(n)

    Watching(symbolic_trace(ReluAndNeg())).transform()
    assert names == ["x", "add", "relu", "neg", "output"]


def test_target_that_does_not_exist_is_refused() -> None:
    class Renaming(Transformer):
        def call_module(self, target: Any, args: Any, kwargs: Any):
            return super().call_module(f"missing.{target}", args, kwargs)

    with pytest.raises(TargetError, match=r"'missing\.0'"):
        Renaming(symbolic_trace(nn.Sequential(nn.ReLU()))).transform()


def test_parameter_that_the_module_does_not_own_is_refused() -> None:
    class Adding(Transformer):
        def call_module(self, target: Any, args: Any, kwargs: Any):
            return super().call_module(target, args, kwargs) + nn.Parameter(torch.ones(3))

    with pytest.raises(ModulePathError, match="that the model does not own"):
        Adding(symbolic_trace(nn.Sequential(nn.ReLU()))).transform()


def test_attribute_that_takes_the_place_of_a_node_is_recorded_there() -> None:
    class Shapes(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return args[0].shape if target is torch.relu else super().call_function(target, args, kwargs)

    module = Shapes(symbolic_trace(lambda x: [torch.relu(x), x + 1])).transform()
    assert [node.target for node in module.graph.nodes][1:3] == [getattr, operator.add]
    assert module(X)[0] == X.shape
