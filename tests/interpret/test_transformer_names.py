"""What a Transformer carries over from old nodes to new ones: names, qualified names, places in the model, effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx import Graph, GraphModule, Node, Transformer, symbolic_trace
from featx.ir.effects import Effects, MeasuredEffects

X = torch.tensor([[1.0, -2.0, 3.0]])


class Inner(nn.Module):
    def forward(self, x: torch.Tensor):
        return torch.relu(torch.relu(x) + 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor):
        return torch.sigmoid(self.inner(x))


def names(module: GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes]


def by_name(module: GraphModule) -> dict[str, Node]:
    return {node.name: node for node in module.graph.nodes}


def qualified(module: GraphModule) -> dict[str, Any]:
    return {node.meta["qualified_name"]: node for node in module.graph.nodes if "qualified_name" in node.meta}


def test_meta_of_a_traced_model_is_carried_over() -> None:
    module = featx.trace(Model(), X)
    for node in module.graph.nodes:
        node.meta["tag"] = node.name
    copies = Transformer(module).transform()
    assert names(copies) == names(module)
    for node, copy in zip(module.graph.nodes, copies.graph.nodes, strict=True):
        assert copy.meta == node.meta
        assert copy.meta is not node.meta
    relu = next(node for node in copies.graph.nodes if node.target is torch.relu)
    assert {"qualified_name", "nn_module_stack", "source", "shape", "dtype", "tag"} <= set(relu.meta)


def test_names_that_nobody_would_number_so_are_kept() -> None:
    module = symbolic_trace(Model())
    for node, name in zip(module.graph.nodes, ("x", "b", "add_7", "a", "relu", "output"), strict=True):
        node.name = name
    assert names(Transformer(module).transform()) == names(module)


class Before(Transformer):
    """Puts a relu before each relu."""

    def call_function(self, target: Any, args: Any, kwargs: Any):
        if target is torch.relu:
            args = (super().call_function(torch.relu, args, {}),)
        return super().call_function(target, args, kwargs)


class After(Transformer):
    """Puts an absolute value after each relu."""

    def call_function(self, target: Any, args: Any, kwargs: Any):
        result = super().call_function(target, args, kwargs)
        return torch.abs(result) if target is torch.relu else result


class Instead(Transformer):
    """Puts (x > 0) * x in the place of each relu."""

    def call_function(self, target: Any, args: Any, kwargs: Any):
        return (args[0] > 0) * args[0] if target is torch.relu else super().call_function(target, args, kwargs)


def test_new_nodes_do_not_take_the_names_of_old_ones() -> None:
    class Inserting(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            # Is made first, and so would be called relu.
            return super().call_function(target, (torch.relu(args[0] * 1),), kwargs)

    def function(x: Any) -> Any:
        return torch.sigmoid(torch.relu(torch.abs(x)))

    module = Inserting(symbolic_trace(function)).transform()
    module.graph.lint()
    old = [node for node in module.graph.nodes if node.meta.get("qualified_name")]
    assert [node.name for node in old] == ["x", "abs_1", "relu", "sigmoid"]
    assert [node.target for node in old][1:] == [torch.abs, torch.relu, torch.sigmoid]
    assert len(set(names(module))) == len(module.graph.nodes) == 11


def test_new_node_makes_way_for_each_old_one_that_has_its_name() -> None:
    class Inserting(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            result = super().call_function(target, args, kwargs)
            return torch.relu(result) if target is torch.abs else result

    module = Inserting(symbolic_trace(lambda x: torch.relu(torch.relu(torch.abs(x))))).transform()
    assert names(module) == ["x", "abs_1", "relu_2", "relu", "relu_1", "output"]


def test_new_node_that_a_subclass_named_keeps_that_name() -> None:
    class Inserting(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            result = super().call_function(target, args, kwargs)
            if target is torch.abs:
                result = torch.relu(result)
                result.node.name = "mine"
            return result

    module = Inserting(symbolic_trace(lambda x: torch.relu(torch.abs(x)))).transform()
    assert names(module) == ["x", "abs_1", "mine", "relu", "output"]


def test_type_goes_to_the_copy() -> None:
    module = symbolic_trace(Model())
    for node in module.graph.find_nodes(op="call_function", target=torch.relu):
        node.type = torch.Tensor
    copies = Before(module).transform()
    assert [by_name(copies)[name].type for name in ("relu", "relu_1", "add")] == [torch.Tensor, torch.Tensor, None]


@pytest.mark.parametrize(
    ("transformer", "expected"),
    [(Before, ["relu", "relu_1"]), (After, ["abs_1", "abs_2"]), (Instead, ["mul", "mul_1"])],
)
def test_qualified_name_goes_to_what_takes_the_place_of_the_node(
    transformer: type[Transformer], expected: list[str]
) -> None:
    module = transformer(symbolic_trace(Model())).transform()
    module.graph.lint()
    found = qualified(module)
    assert list(found) == ["x", "inner.relu", "inner.add", "inner.relu_1", "sigmoid"]
    for name, new_name in zip(("inner.relu", "inner.relu_1"), expected, strict=True):
        node = found[name]
        # Whoever read the old node reads this one.
        assert [user.meta["qualified_name"] for user in node.users] in (["inner.add"], ["sigmoid"])
        assert node.name == new_name
    assert torch.equal(module(X), Model()(X))


def test_everything_that_is_made_for_a_node_says_where_in_the_model_that_was() -> None:
    module = Instead(featx.trace(Model(), X)).transform()
    gt, mul = by_name(module)["gt"], by_name(module)["mul"]
    relu = next(node for node in featx.trace(Model(), X).graph.nodes if node.target is torch.relu)
    for node in (gt, mul):
        assert node.meta["source"] == relu.meta["source"]
        assert list(node.meta["nn_module_stack"]) == ["inner"]
        # They are of another operation, whose form nobody has asked for.
        assert "shape" not in node.meta
    assert "qualified_name" not in gt.meta
    assert mul.meta["qualified_name"] == relu.meta["qualified_name"]


def test_meta_that_a_subclass_sets_is_not_overwritten() -> None:
    class Tagging(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            result = super().call_function(target, args, kwargs)
            result.node.meta["qualified_name"] = f"mine.{target.__name__}"
            result.node.name = f"{result.node.name}_mine"
            return result

    module = Tagging(symbolic_trace(Model())).transform()
    found = [node.meta.get("qualified_name") for node in module.graph.nodes]
    assert found == ["x", "mine.relu", "mine.add", "mine.relu", "mine.sigmoid", None]
    assert names(module)[1:5] == ["relu_mine", "add_mine", "relu_1_mine", "sigmoid_mine"]


def test_node_that_already_stood_there_keeps_its_own_qualified_name() -> None:
    class Dropping(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            return args[0] if target is torch.relu else super().call_function(target, args, kwargs)

    assert list(qualified(Dropping(symbolic_trace(Model())).transform())) == ["x", "inner.add", "sigmoid"]


def test_node_behind_one_that_went_is_not_taken_for_its_copy() -> None:
    dropped: list[Any] = []

    class Bypassing(Transformer):
        def run_node(self, n: Any):
            if n.name != "relu_1":
                return super().run_node(n)
            return self.call_function(n.target, *self.fetch_args_kwargs_from_env(n))

        def call_function(self, target: Any, args: Any, kwargs: Any):
            if not dropped:
                dropped.append(target)
                return args[0]
            return super().call_function(target, args, kwargs)

    old = symbolic_trace(lambda x: torch.relu(torch.relu(x)))
    old.graph.find_nodes(op="call_function", target=torch.relu)[0].name = "gone"
    module = Bypassing(old).transform()
    assert [(node.name, node.meta.get("qualified_name")) for node in module.graph.nodes] == [
        ("x", "x"), ("relu", None), ("output", None),
    ]  # fmt: skip


def calls_of(swap: bool) -> tuple[MeasuredEffects | None, list[str]]:
    """Transform a call of which it is known what it writes, swapping its inputs or not; return that, and its writes."""

    class Swapping(Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            return super().call_function(target, args[::-1] if swap else args, kwargs)

    def write(one: Any, other: Any) -> Any:
        return other.add_(1)

    graph = Graph()
    node = graph.call_function(write, (graph.placeholder("x"), graph.placeholder("y")))
    node.meta["effects"] = MeasuredEffects(writes=(1,))
    graph.output(node)
    module = Swapping(GraphModule(nn.Module(), graph)).transform()
    copy = by_name(module)["write"]
    return copy.meta.get("effects"), [written.name for written in Effects(module.graph).of(copy).writes]


def test_measured_effects_hold_for_a_call_with_the_same_inputs() -> None:
    assert calls_of(swap=False) == (MeasuredEffects(writes=(1,)), ["y"])


def test_measured_effects_are_forgotten_where_the_inputs_are_others() -> None:
    # Of a function that is not known, both arguments are assumed to be written.
    assert calls_of(swap=True) == (None, ["y", "x"])
