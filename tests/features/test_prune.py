"""prune: the part of a graph that chosen values depend on, writers and checks included, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Runs the function it is given; has parts for it to use."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def pruned(function: Callable[[Any, Any], Any], *names: str) -> tuple[featx.GraphModule, Model]:
    model = Model(function)
    graph = featx.FeatureTracer().trace(model)
    wanted = featx.select(graph, {name: name for name in names}, "Model")
    return featx.GraphModule(model, featx.prune(graph, wanted, model)), model


def kept(function: Callable[[Any, Any], Any], *names: str) -> list[str]:
    return [node.name for node in pruned(function, *names)[0].graph.nodes if node.op not in ("placeholder", "output")]


# -- what goes ---------------------------------------------------------------------------------------------------------


def test_what_comes_after_and_beside_the_wanted_value_is_gone() -> None:
    def function(model: Model, x: Any) -> Any:
        beside = model.b(x).sum()
        return model.b(model.a(x) + 1) + beside

    assert kept(function, "a") == ["a"]


def test_write_into_a_wanted_value_that_comes_later_is_gone() -> None:
    assert kept(lambda model, x: model.a(x).add_(1), "a") == ["a"]


def test_write_into_something_else_is_gone() -> None:
    def function(model: Model, x: Any) -> Any:
        other = model.b(x)
        other.add_(1)
        return model.a(x) + other

    assert kept(function, "a") == ["a"]


def test_random_draw_behind_every_wanted_value_is_gone() -> None:
    assert kept(lambda model, x: model.drop(model.a(x)), "a") == ["a"]


def test_check_of_something_that_is_not_kept_is_gone() -> None:
    def function(model: Model, x: Any) -> Any:
        torch._assert(model.b(x).sum() > 0, "computes what nobody wants")
        return model.a(x)

    assert kept(function, "a") == ["a"]


def test_every_input_stays() -> None:
    graph = featx.Tracer().trace(lambda x, y: (x + 1, y + 1))
    wanted = {"first": next(node for node in graph.nodes if node.name == "add")}
    small = featx.prune(graph, wanted, nn.Module())
    assert [node.name for node in small.nodes] == ["x", "y", "add", "output"]


def test_graph_that_is_pruned_is_not_changed() -> None:
    model = Model(lambda model, x: model.b(model.a(x)))
    graph = featx.Tracer().trace(model)
    before, edits = str(graph), graph.edits
    featx.prune(graph, {"a": next(node for node in graph.nodes if node.name == "a")}, model)
    assert (str(graph), graph.edits) == (before, edits)


def test_result_is_a_well_formed_graph_that_returns_a_dict() -> None:
    traced, model = pruned(lambda model, x: model.b(model.a(x)), "b", "a")
    traced.graph.lint()
    result = traced(X)
    assert list(result) == ["b", "a"]
    assert torch.equal(result["a"], model.a(X))


# -- what stays --------------------------------------------------------------------------------------------------------


def assigned_item(model: Model, x: Any) -> Any:
    x = model.a(x)
    x[0] = 1
    return model.b(x)


def in_place_method(model: Model, x: Any) -> Any:
    x = model.a(x)
    x.add_(1)
    return model.b(x)


def in_place_function(model: Model, x: Any) -> Any:
    x = model.a(x)
    torch.relu_(x)
    functional.relu(x, inplace=True)
    return model.b(x)


def in_place_module(model: Model, x: Any) -> Any:
    x = model.a(x)
    model.relu(x)
    return model.b(x)


def write_through_a_view(model: Model, x: Any) -> Any:
    x = model.a(x)
    x[:, 0].mul_(3)
    x.view(-1)[1:].add_(1)
    return model.b(x)


def write_into_a_view_of_a_view(model: Model, x: Any) -> Any:
    x = model.a(x)
    row = x.transpose(0, 1)[0]
    x.add_(1)
    row.zero_()
    return model.b(x)


def out_argument(model: Model, x: Any) -> Any:
    y = model.a(x)
    torch.add(x, 1, out=y)
    return model.b(y)


def write_into_the_input(model: Model, x: Any) -> Any:
    x.add_(1)
    return model.b(x)


def augmented_alias(model: Model, x: Any) -> Any:
    x = model.a(x)
    y = x
    x += 1
    return model.b(y)


def copied_into(model: Model, x: Any) -> Any:
    target = torch.zeros(2, 3)
    target[:1].copy_(model.a(x)[:1])
    return model.b(target)


@pytest.mark.parametrize(
    "function",
    [
        assigned_item,
        in_place_method,
        in_place_function,
        in_place_module,
        write_through_a_view,
        write_into_a_view_of_a_view,
        out_argument,
        write_into_the_input,
        augmented_alias,
        copied_into,
    ],
    ids=lambda function: function.__name__,
)
def test_write_that_nobody_names_stays(function: Callable[[Any, Any], Any]) -> None:
    traced, model = pruned(function, "b")
    with torch.no_grad():
        assert torch.equal(traced(X.clone())["b"], model(X.clone()))


def test_write_into_state_that_a_kept_part_reads_stays_for_the_next_call() -> None:
    def function(model: Model, x: Any) -> Any:
        y = model.a(x + model.state)
        model.state.add_(1)
        return y

    traced, model = pruned(function, "a")
    with torch.no_grad():
        results = [traced(X)["a"] for _ in range(3)]
    assert torch.equal(results[2], model.a(X + 2))


def test_draw_ahead_of_a_kept_draw_stays_so_that_the_seed_means_the_same() -> None:
    def function(model: Model, x: Any) -> Any:
        beside = model.drop(model.b(x))
        return model.drop(model.a(x)) + beside

    traced, model = pruned(function, "drop_1")
    torch.manual_seed(0)
    result = traced(X)["drop_1"]
    torch.manual_seed(0)
    model.drop(model.b(X))
    assert torch.equal(result, model.drop(model.a(X)))


@pytest.mark.parametrize(("name", "has_gradient"), [("x", False), ("a", True), ("add", False), ("b", True)])
def test_value_before_inside_and_behind_a_region_without_gradients_can_be_wanted(name: str, has_gradient: bool) -> None:
    def function(model: Model, x: Any) -> Any:
        y = model.a(x)
        with torch.no_grad():
            y = y + 1
        return model.b(y)

    traced, _ = pruned(function, name)
    assert traced(X)[name].requires_grad is has_gradient
    assert torch.is_grad_enabled()


def test_value_between_two_regions_without_gradients_can_be_wanted() -> None:
    def function(model: Model, x: Any) -> Any:
        with torch.no_grad():
            x = x + 1
        y = model.a(x)
        with torch.no_grad():
            return model.b(y)

    traced, model = pruned(function, "a")
    assert torch.equal(traced(X)["a"], model.a(X + 1))
    assert traced(X)["a"].requires_grad


def test_region_without_gradients_behind_every_wanted_value_is_gone() -> None:
    def function(model: Model, x: Any) -> Any:
        y = model.a(x)
        with torch.no_grad():
            return model.b(y)

    assert kept(function, "a") == ["a"]


def test_check_of_the_form_of_a_kept_value_stays() -> None:
    def function(model: Model, x: Any) -> Any:
        torch._assert(x.shape[0] == 2, "two rows")
        y = model.a(x)
        torch._assert(y.dim() == 2, "two dimensions")
        return model.b(y)

    traced, _ = pruned(function, "b")
    with pytest.raises(AssertionError, match="two rows"):
        traced(X[:1])


def test_in_place_chain_whose_result_is_used_stays_whole() -> None:
    traced, model = pruned(lambda model, x: model.b(model.a(x).add_(1).mul_(2)), "b")
    assert torch.equal(traced(X)["b"], model(X))


# -- values that are overwritten ---------------------------------------------------------------------------------------


def test_wanted_value_is_cloned_before_it_is_overwritten() -> None:
    traced, model = pruned(lambda model, x: model.relu(model.a(x)), "a", "relu")
    result = traced(X)
    assert torch.equal(result["a"], model.a(X))
    assert torch.equal(result["relu"], model.a(X).relu())


def test_wanted_value_that_nobody_overwrites_is_not_cloned() -> None:
    traced, _ = pruned(lambda model, x: model.b(model.a(x)), "a", "b")
    assert "clone" not in traced.code


def test_wanted_value_whose_overwriter_is_cut_off_is_not_cloned() -> None:
    traced, _ = pruned(lambda model, x: model.relu(model.a(x)), "a")
    assert "clone" not in traced.code


def test_wanted_view_of_memory_that_is_overwritten_is_cloned() -> None:
    def function(model: Model, x: Any) -> Any:
        y = model.a(x)
        z = y.view(-1)
        y.add_(1)
        return z, model.b(y)

    traced, model = pruned(function, "view", "b")
    assert torch.equal(traced(X)["view"], model.a(X).view(-1))


def test_wanted_tuple_that_is_overwritten_is_cloned_inside() -> None:
    def function(model: Model, x: Any) -> Any:
        parts = model.a(x).split(1)
        parts[0].add_(1)
        return model.b(torch.cat(parts))

    traced, model = pruned(function, "split", "b")
    with torch.no_grad():
        assert all(map(torch.equal, traced(X)["split"], model.a(X).split(1)))


def test_wanted_input_that_the_model_overwrites_is_cloned() -> None:
    def function(model: Model, x: Any) -> Any:
        x.mul_(2)
        return model.b(x)

    traced, _ = pruned(function, "x", "b")
    assert torch.equal(traced(X.clone())["x"], X)


def test_gradients_flow_through_a_clone() -> None:
    traced, _ = pruned(lambda model, x: model.relu(model.a(x)), "a", "relu")
    x = X.clone().requires_grad_()
    result = traced(x)
    (result["a"].sum() + result["relu"].sum()).backward()
    assert x.grad is not None


def test_foreign_node_is_refused() -> None:
    model = Model(lambda model, x: model.a(x))
    graph, other = featx.Tracer().trace(model), featx.Tracer().trace(model)
    foreign = next(node for node in other.nodes if node.name == "a")
    with pytest.raises(featx.ForeignNodeError, match="'a'") as caught:
        featx.prune(graph, {"a": foreign}, model)
    assert isinstance(caught.value, RuntimeError)


def test_erased_node_is_refused() -> None:
    model = Model(lambda model, x: (model.b(x), model.a(x))[1])
    graph = featx.Tracer().trace(model)
    erased = next(node for node in graph.nodes if node.name == "b")
    graph.erase_node(erased)
    with pytest.raises(featx.ForeignNodeError):
        featx.prune(graph, {"b": erased}, model)


def joined_slices(model: Model, x: Any) -> Any:
    parts = x.chunk(2)
    (parts[1:] + parts[:1])[0].add_(1)
    return model.a(x)


def repeated_parts(model: Model, x: Any) -> Any:
    (x.chunk(2) * 2)[3].add_(1)
    return model.a(x)


@pytest.mark.parametrize("function", [joined_slices, repeated_parts])
def test_write_through_containers_that_operators_make_is_kept(function: Callable[[Any, Any], Any]) -> None:
    model = Model(function).eval()
    extractor = featx.create_feature_extractor(model, ["a"], tracer="symbolic")
    assert torch.equal(extractor(X.clone())["a"], model(X.clone()))


def test_write_through_a_merged_dict_is_kept() -> None:
    class OfDict(nn.Module):
        def forward(self, items: Any) -> Any:
            merged = items | {"y": 1}
            merged["x"].add_(1)
            return items["x"] * 1.0

    extractor = featx.create_feature_extractor(OfDict(), ["mul"], tracer="symbolic")
    assert torch.equal(extractor({"x": X.clone()})["mul"], OfDict()({"x": X.clone()}))
