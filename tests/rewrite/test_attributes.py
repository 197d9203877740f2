"""What a replacement calls and reads: what was matched, what the model has, or what it brings along."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer import absolute, rewritten_alike
from torch import nn
from torch.nn import functional

import featx


class Holder(nn.Module):
    """Has what it is given, and does with it and `x` what it is told."""

    def __init__(self, function: Callable[[Any, Any], Any], **values: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in values.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def sigmoid_act(module: Any, x: Any) -> Any:
    return module.act(module.sigmoid(x))


def test_new_submodule_is_installed_and_the_old_one_removed_as_in_torch_fx() -> None:
    pattern = Holder(sigmoid_act, sigmoid=nn.Sigmoid(), act=nn.ReLU())
    replacement = Holder(lambda m, x: m.act(m.tanh(x)), tanh=nn.Tanh(), act=nn.ReLU())
    rewritten_alike(pattern, pattern, replacement, x)
    module = featx.symbolic_trace(pattern)
    kept = module.act
    featx.replace_pattern(module, pattern, replacement)
    assert {name: type(child) for name, child in module.named_children()} == {"act": nn.ReLU, "tanh": nn.Tanh}
    assert module.act is kept
    assert module.tanh is not replacement.tanh


def test_nothing_is_removed_where_the_replacement_is_a_function() -> None:
    module = featx.symbolic_trace(Holder(sigmoid_act, sigmoid=nn.Sigmoid(), act=nn.ReLU()))
    pattern = Holder(lambda m, x: m.sigmoid(x), sigmoid=nn.Sigmoid())
    assert len(featx.replace_pattern(module, pattern, absolute)) == 1
    assert isinstance(module.sigmoid, nn.Sigmoid)


def test_submodule_that_is_called_elsewhere_stays() -> None:
    model = Holder(lambda m, x: m.act(x) + m.act(m.sigmoid(x)), sigmoid=nn.Sigmoid(), act=nn.ReLU())
    module = featx.symbolic_trace(model)
    pattern = Holder(sigmoid_act, sigmoid=nn.Sigmoid(), act=nn.ReLU())
    featx.replace_pattern(module, pattern, Holder(lambda m, x: x))
    assert [name for name, _ in module.named_children()] == ["act"]


def test_container_that_is_emptied_goes_too() -> None:
    module = featx.symbolic_trace(nn.Sequential(nn.Sequential(nn.Sigmoid()), nn.ReLU()))
    pattern = Holder(lambda m, x: m.sigmoid(x), sigmoid=nn.Sigmoid())
    featx.replace_pattern(module, pattern, Holder(lambda m, x: x), match_modules="type")
    assert [name for name, _ in module.named_modules()] == ["", "1"]


def test_matched_module_and_its_weights_serve_the_replacement() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Sequential(nn.Linear(3, 5), nn.Sigmoid()))
    parts = {"any": nn.Linear(1, 1), "act": nn.Sigmoid()}
    pattern = Holder(lambda m, x: m.act(m.any(x)), **parts)
    by_parts = Holder(lambda m, x: m.act(functional.linear(x, m.any.weight, m.any.bias)), **parts)
    whole = Holder(lambda m, x: m.act(m.any(x)).neg(), **parts)
    first = model[1](model[0](x)).neg()
    for replacement, expected in ((by_parts, model(x)), (whole, torch.sigmoid(model[2][0](first)).neg())):
        module = featx.symbolic_trace(model)
        assert len(featx.replace_pattern(module, pattern, replacement, match_modules="type")) == 2
        assert torch.equal(module(x), expected)
        assert {id(value) for value in module.parameters()} == {id(value) for value in model.parameters()}


def test_matched_parameter_serves_the_replacement() -> None:
    values = {name: nn.Parameter(torch.tensor(value)) for name, value in (("scale", 2.0), ("other", 5.0))}
    model = Holder(lambda m, x: x * m.scale + x * m.other, **values)
    pattern = Holder(lambda m, x: x * m.weight, weight=nn.Parameter(torch.zeros(1)))
    replacement = Holder(lambda m, x: x - m.weight, weight=nn.Parameter(torch.zeros(1)))
    module = featx.symbolic_trace(model)
    assert len(featx.replace_pattern(module, pattern, replacement)) == 2
    assert torch.equal(module(x), (x - 2) + (x - 5))
    assert sorted(name for name, _ in module.named_parameters()) == ["other", "scale"]


def test_what_the_model_has_at_a_path_is_used_as_in_torch_fx() -> None:
    model = Holder(lambda m, x: m.linear(torch.relu(x)), linear=nn.Linear(4, 4))
    replacement = Holder(lambda m, x: m.linear(x).abs(), linear=nn.Linear(4, 4))
    rewritten_alike(model, lambda x: torch.relu(x), replacement, x)


@pytest.mark.parametrize("other", [nn.Tanh(), nn.GELU("tanh")])
def test_other_module_at_the_same_path_is_not_mistaken_for_the_replacements(other: nn.Module) -> None:
    model = Holder(lambda m, x: m.act(torch.relu(x)), act=nn.GELU())
    module = featx.symbolic_trace(model)
    featx.replace_pattern(module, lambda x: torch.relu(x), Holder(lambda m, x: m.act(x), act=other))
    assert torch.equal(module(x), functional.gelu(other(x)))  # torch.fx runs gelu twice


def test_names_of_a_replacement_are_its_own_where_modules_match_by_class() -> None:
    model = Holder(lambda m, x: m.linear(torch.relu(x)), linear=nn.Linear(4, 4))
    replacement = Holder(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))
    module = featx.symbolic_trace(model)
    featx.replace_pattern(module, lambda x: torch.relu(x), replacement, match_modules="type")
    assert torch.equal(module(x), model.linear(replacement.linear(x)))
    assert sorted(name for name, _ in module.named_children()) == ["linear", "linear_1"]


def test_each_replacement_of_a_callback_brings_its_own() -> None:
    module = featx.symbolic_trace(lambda x: torch.relu(torch.relu(x)))
    made = [Holder(lambda m, x: m.linear(x), linear=nn.Linear(4, 4)) for _ in range(2)]
    waiting = iter(made)
    featx.replace_pattern_with_filters(module, lambda x: torch.relu(x), replacement_callback=lambda *_: next(waiting))
    assert torch.equal(module(x), made[1].linear(made[0].linear(x)))


def test_tensors_are_registered_as_in_the_replacement() -> None:
    ones = nn.Parameter(torch.ones(4))
    values = {"weight": ones, "plain": torch.ones(4), "inner": Holder(absolute, bias=nn.Parameter(torch.ones(4)))}
    replacement = Holder(lambda m, x: x * m.weight + m.mean + m.hidden + m.inner.bias + m.plain, **values)
    replacement.register_buffer("mean", torch.ones(4))
    replacement.register_buffer("hidden", torch.ones(4), persistent=False)
    module = featx.symbolic_trace(lambda x: torch.relu(x) + torch.sigmoid(x) + torch.relu(x.neg()))
    assert len(featx.replace_pattern(module, lambda x: torch.relu(x), replacement)) == 2
    assert torch.equal(module(x), replacement(x) + torch.sigmoid(x) + replacement(-x))
    assert sorted(module.state_dict()) == ["inner.bias", "mean", "weight"]
    assert sorted(name for name, _ in module.named_buffers()) == ["hidden", "mean"]
    assert module.weight is not replacement.weight
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_copies_are_in_eval_mode_if_the_module_is() -> None:
    replacement = Holder(lambda m, x: m.dropout(m.inner(x)), dropout=nn.Dropout(), inner=nn.Sequential(nn.Dropout()))
    module = featx.symbolic_trace(lambda x: torch.relu(x)).eval()
    featx.replace_pattern(module, lambda x: torch.relu(x), replacement)
    assert not any(child.training for child in module.modules())
    assert torch.equal(module(x), x)
    assert replacement.dropout.training


def test_module_of_the_model_that_is_called_whole_gets_nothing_put_inside() -> None:
    model = Holder(lambda m, x: m.block(torch.relu(x)), block=nn.Linear(4, 4))
    replacement = Holder(lambda m, x: m.block.inner(x), block=Holder(absolute, inner=nn.Linear(4, 4)))
    module = featx.symbolic_trace(model)
    featx.replace_pattern(module, lambda x: torch.relu(x), replacement)
    assert list(model.block._modules) == []
    assert torch.equal(module(x), model.block(replacement.block.inner(x)))


@pytest.mark.parametrize("name", ["graph", "code", "recompile", "add_submodule"])
def test_name_of_something_else_in_a_graph_module_is_not_taken(name: str) -> None:
    replacement = Holder(lambda m, x: getattr(m, name)(x), **{name: nn.Tanh()})
    module = featx.symbolic_trace(lambda x: torch.relu(x))
    featx.replace_pattern(module, lambda x: torch.relu(x), replacement)
    assert torch.equal(module(x), torch.tanh(x))


def test_graph_replacement_refers_to_the_module_itself() -> None:
    def scaled(match: Any, graph: Any, pattern: Any) -> featx.Graph:
        made = featx.Graph()
        made.output(made.call_function(torch.mul, (made.placeholder("x"), made.get_attr("linear.weight"))))
        return made

    model = Holder(lambda m, x: m.linear(torch.relu(x)), linear=nn.Linear(4, 2))
    module = featx.symbolic_trace(model)
    featx.replace_pattern_with_filters(module, lambda x: torch.relu(x), replacement_callback=scaled)
    assert torch.equal(module(x), model.linear(x * model.linear.weight))


def test_target_that_nobody_has_is_refused_and_nothing_changed() -> None:
    replacement = featx.Graph()
    replacement.output(replacement.call_module("absent", (replacement.placeholder("x"),)))
    module = featx.symbolic_trace(lambda x: torch.relu(x))
    before = str(module.graph)
    with pytest.raises(featx.TargetError, match="refers to 'absent', which neither the replacement nor"):
        featx.replace_pattern(module, lambda x: torch.relu(x), replacement)
    assert str(module.graph) == before


def test_weight_that_the_matched_module_lacks_is_refused_and_nothing_changed() -> None:
    pattern = Holder(lambda m, x: m.act(x), act=nn.PReLU())
    replacement = Holder(lambda m, x: x * m.act.slope, act=Holder(absolute, slope=nn.Parameter(torch.ones(1))))
    module = featx.symbolic_trace(nn.Sequential(nn.PReLU()))
    before = str(module.graph)
    with pytest.raises(featx.TargetError, match=r"refers to '0\.slope'"):
        featx.replace_pattern(module, pattern, replacement, match_modules="type")
    assert str(module.graph) == before


def test_nothing_is_installed_where_nothing_matches() -> None:
    module = featx.symbolic_trace(Holder(lambda m, x: torch.neg(m.linear(x)), linear=nn.Linear(4, 4)))
    replacement = Holder(lambda m, x: m.tanh(x), tanh=nn.Tanh())
    assert featx.replace_pattern(module, lambda x: torch.relu(x), replacement) == []
    assert [name for name, _ in module.named_modules()] == ["", "linear"]
