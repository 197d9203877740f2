"""ExampleTracer: what a graph computes is what the model computes, bit for bit, or it says why it does not."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import featx

Snapshot = Callable[[nn.Module], Any]


def image(batch: int = 2, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


def same(one: Any, other: Any) -> bool:
    """Compare two outputs bit for bit, at any depth."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and type(one) is type(other)


def run(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
    return module(*copies, **kwargs)


def agree(model: nn.Module, example: tuple[Any, ...], *others: tuple[Any, ...]) -> featx.GraphModule:
    """Trace on `example`, compare with the model there and on others, and return what was traced."""
    traced = featx.trace(model, *example)
    for args in (example, *others):
        assert same(run(traced, *args), run(model, *args))
    return traced


# -- what Python decides -----------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 3 else x + 1


def test_branch_on_a_size_holds_on_its_side_and_is_checked_on_the_other() -> None:
    traced = agree(Branch(), (image(1),), (image(2),), (image(3, 6),))
    for batch in (4, 9):
        with pytest.raises(featx.SpecializationError):
            traced(image(batch))
    assert same(featx.trace(Branch(), image(4))(image(4)), image(4) * 2)


class OnValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1


def test_branch_on_a_value_holds_for_its_answer_and_is_checked_for_the_other() -> None:
    model = OnValue()
    traced = agree(model, (torch.ones(2, 3),), (torch.full((4, 5), 0.5),))
    with pytest.raises(featx.SpecializationError):
        traced(-torch.ones(2, 3))
    other = featx.trace(model, -torch.ones(2, 3))
    assert same(other(-torch.ones(2, 3)), -torch.ones(2, 3) - 1)


class LargerSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(max(x.shape), min(x.shape[0], 3))


def test_maximum_of_sizes_is_right_or_refused_at_every_size() -> None:
    model = LargerSize()
    traced = agree(model, (image(2, 5),))
    for batch, width in ((1, 5), (2, 6), (5, 2), (4, 9), (3, 5)):
        try:
            result = traced(image(batch, width))
        except featx.SpecializationError:
            continue
        assert same(result, model(image(batch, width)))


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in range(x.shape[0]):
            x = x + row
        return x


def test_loop_over_a_size_fixes_it_and_leaves_the_others_free() -> None:
    model = Loop()
    traced = agree(model, (image(3),), (image(3, 9),))
    for batch in (2, 4):
        with pytest.raises(featx.SpecializationError):
            traced(image(batch))


class Slices(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return torch.cat([x[:, half:], x[:, :half]], 1) * (x.shape[0] / half)


def test_arithmetic_on_sizes_is_followed_to_other_sizes() -> None:
    agree(Slices(), (image(2, 4),), (image(3, 4),), (image(2, 8),), (image(5, 7),))


class FactoryOfSize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[0], 1, dtype=x.dtype, device=x.device)
        place = torch.arange(x.size(1), dtype=x.dtype)
        return x + mask + place


def test_tensors_made_of_sizes_are_made_anew_at_other_sizes() -> None:
    agree(FactoryOfSize(), (image(2),), (image(5),), (image(3, 7),))


class Unpacked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width = x.shape
        return x.reshape(batch * width, 1).expand(-1, batch).reshape(-1, width)


def test_unpacked_shape_follows_the_input() -> None:
    agree(Unpacked(), (image(2),), (image(3, 6),))


class ChunkLoop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((part.mean() for part in x.split(1)), torch.zeros(()))


def test_number_of_pieces_that_a_loop_runs_over_is_checked() -> None:
    traced = agree(ChunkLoop(), (image(3),), (image(3, 8),))
    with pytest.raises(featx.SpecializationError):
        traced(image(4))


class Item(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()


def test_item_is_read_again_in_each_call() -> None:
    agree(Item(), (image(2),), (image(2, seed=3),), (image(5, 6),))


# -- modules, weights, buffers -----------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.scale = nn.Parameter(torch.arange(4.0))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(self.first(x)))) * self.scale + self.shift.sum()


def test_shared_module_called_several_times_and_direct_weights() -> None:
    model = Shared()
    agree(model, (image(),), (image(5),))
    names = featx.get_graph_node_names(model, example_inputs=image())[0]
    assert [name for name in names if name.startswith("first")] == ["first", "first_1", "first_2"]
    assert "second" not in names


def test_change_of_a_weight_after_the_trace_is_seen() -> None:
    model = Shared()
    traced = featx.trace(model, image())
    with torch.no_grad():
        model.scale.fill_(3.0)
        model.first.weight.mul_(2)
        model.shift.add_(1)
    assert same(traced(image()), model(image()))


class WithNormalizedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_parametrized_weight_is_computed_in_each_call_and_has_gradients() -> None:
    model = WithNormalizedWeight()
    traced = agree(model, (image(),), (image(7),))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert same(traced(image()), model(image()))
    traced(image()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x))


def test_running_statistics_stay_in_a_trace_and_move_in_a_run(snapshot: Snapshot) -> None:
    model = Normalized().train()
    before = snapshot(model)
    traced = featx.trace(model, image(5))
    before.check()
    traced(image(5))
    assert model.norm.num_batches_tracked == 1
    assert not torch.equal(model.norm.running_mean, torch.zeros(4))


class NormalizedByValue(Normalized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.drop(x) * (2.0 if bool((x > -100).all()) else 3.0)


def test_running_statistics_and_generators_are_put_back_after_a_trace_for_real(snapshot: Snapshot) -> None:
    model = NormalizedByValue().train()
    before = snapshot(model)
    featx.trace(model, image(5))
    before.check()
    agree(model.eval(), (image(),), (image(9),))


class Failing(NormalizedByValue):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        self.count = 3
        x = super().forward(x)
        raise ValueError("no further")


def test_model_is_as_before_after_a_trace_that_fails(snapshot: Snapshot) -> None:
    model = Failing().train()
    before = snapshot(model)
    with pytest.raises((ValueError, featx.TraceError)):
        featx.trace(model, image(5))
    before.check()


class WritesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.weight * self.steps


def test_counter_is_left_alone_by_the_trace_and_counts_in_the_graph(snapshot: Snapshot) -> None:
    model, twin = WritesState(), WritesState()
    before = snapshot(model)
    traced = featx.trace(model, image())
    before.check()
    assert all(same(traced(image()), twin(image())) for _ in range(3))
    assert model.steps == 3


# -- what a model leaves behind ----------------------------------------------------------------------------------------


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None
        self.by_size: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=torch.float32) * 2
        return x + self.table


class CachingInDict(Caching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        if size not in self.by_size:
            self.by_size[size] = torch.ones(size) * 3
        return x + self.by_size[size]


@pytest.mark.parametrize("kind", [Caching, CachingInDict])
def test_cache_in_an_attribute_is_not_poisoned_by_a_trace(kind: type[Caching]) -> None:
    model = kind()
    expected = kind()(image())
    traced = featx.trace(model, image())
    assert model.table is None
    assert model.by_size == {}
    assert same(model(image()), expected)
    assert same(traced(image()), expected)
    assert same(model(image(2, 7)), kind()(image(2, 7)))


@functools.cache
def positions(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32)


class Remembering(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + positions(x.shape[1])


def test_cached_function_keyed_by_a_size_is_not_poisoned() -> None:
    positions.cache_clear()
    model = Remembering()
    traced = featx.trace(model, image())
    assert same(model(image()), image() + torch.arange(4.0))
    assert same(traced(image()), image() + torch.arange(4.0))
    assert not positions(4).is_meta
    assert type(positions(4)) is torch.Tensor


def test_einops_can_be_traced_again_and_again() -> None:
    einops = pytest.importorskip("einops")

    class Rearranging(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = einops.rearrange(x, "b (h w) -> b w h", h=2)
            return einops.rearrange(y, "b w h -> (b w) h") * 2

    model = Rearranging()
    for seed in range(3):
        agree(model, (image(2, 6),), (image(2, 6, seed=seed),))
    assert same(model(image(5, 8)), featx.trace(model, image(5, 8))(image(5, 8)))


class Adding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        x[:, 0] = 0
        return x * 2


def test_input_of_the_caller_is_unchanged_by_a_trace_and_written_by_a_run() -> None:
    x = image()
    traced = featx.trace(Adding(), x)
    assert torch.equal(x, image())
    one, other = image(), image()
    assert same(traced(one), Adding()(other))
    assert torch.equal(one, other)
    assert not torch.equal(one, image())


# -- functions of other kinds ------------------------------------------------------------------------------------------


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.size(0) > 2:
        return x * 2
    return x + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # scripting is going away; models with scripted functions are still about
    scripted = torch.jit.script(branching)


class CallsScripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scripted(x) - 1


def test_scripted_function_is_one_node_and_keeps_its_own_control_flow() -> None:
    agree(CallsScripted(), (image(3),), (image(2),), (image(5),))


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class UsesOwnGradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tripled.apply(x) + 1


def test_gradient_of_an_autograd_function_is_kept() -> None:
    traced = agree(UsesOwnGradient(), (image(),), (image(5),))
    x = image().requires_grad_()
    traced(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 4), 3.0))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x, use_reentrant=False) + 1


def test_checkpointed_module_gives_its_value_and_gradient() -> None:
    model = Checkpointed()
    traced = agree(model, (image(),), (image(5),))
    traced(image()).sum().backward()
    gradient = model.linear.weight.grad
    assert gradient is not None
    model.zero_grad()
    model(image()).sum().backward()
    assert torch.equal(gradient, model.linear.weight.grad)


class Mapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row * row.sum())(x)


class HasMapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mapped = Mapped()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mapped(self.linear(x)) + 1


def test_submodule_that_cannot_be_followed_is_kept_whole() -> None:
    model = HasMapped()
    traced = agree(model, (image(),), (image(5),))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["linear", "mapped"]
    assert isinstance(traced.mapped, Mapped)
    extractor = featx.create_feature_extractor(model, ["mapped", "add"], example_inputs=image())
    assert same(extractor(image()), {"mapped": model.mapped(model.linear(image())), "add": model(image())})


# -- inputs and outputs ------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tuple": lambda x: (x + 1, x * 2),
    "list": lambda x: [x + 1, [x * 2]],
    "dict": lambda x: {"a": x + 1, "b": {"c": x * 2}},
    "none": lambda x: (x + 1, None),
    "named": lambda x: Pair(x + 1, x * 2),
    "number": lambda x: (x + 1, x.shape[0], 3),
    "input": lambda x: x,
    "view": lambda x: x.t(),
    "topk": lambda x: torch.topk(x, 2),
}


class Returning(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return OUTPUTS[self.kind](x)


@pytest.mark.parametrize("kind", [kind for kind in OUTPUTS if kind != "topk"])
def test_output_has_the_form_of_the_models(kind: str) -> None:
    agree(Returning(kind), (image(),), (image(5, 6),))


def test_output_of_a_function_with_several_results_has_the_same_values() -> None:
    traced = featx.trace(Returning("topk"), image())
    assert all(map(torch.equal, traced(image(3, 6)), torch.topk(image(3, 6), 2)))


class ReturningObject(nn.Module):
    def forward(self, x: torch.Tensor) -> Result:
        return Result(x + 1)


def test_output_that_is_a_dataclass_is_built_by_the_graph() -> None:
    result = featx.trace(ReturningObject(), image())(image(5))
    assert type(result) is Result
    assert same(result.logits, image(5) + 1)
    assert result.loss is None


class Inputs(nn.Module):
    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 2.0, *, shift: torch.Tensor
    ) -> torch.Tensor:
        if mask is not None:
            x = x * mask
        return x * scale + shift


def test_keyword_only_input_is_an_input_and_what_is_left_out_is_checked() -> None:
    model, shift = Inputs(), image(seed=1)
    traced = featx.trace(model, image(), shift=shift)
    assert same(traced(image(), shift=shift), model(image(), shift=shift))
    with pytest.raises(featx.FeatxError):
        traced(image(), image(seed=2), shift=shift)
    with pytest.raises(featx.FeatxError):
        traced(image(), None, 3.0, shift=shift)
    masked = featx.trace(model, image(), image(seed=2), 3.0, shift=shift)
    assert same(masked(image(), image(seed=4), 3.0, shift=shift), model(image(), image(seed=4), 3.0, shift=shift))
    with pytest.raises(featx.FeatxError):
        masked(image(), shift=shift)


class Nested(nn.Module):
    def forward(self, xs: list[torch.Tensor], more: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        total = more["pair"][0] * more["pair"][1]
        for x in xs:
            total = total + x.mean(0)
        return total


def test_nested_inputs_are_followed_and_their_form_is_checked() -> None:
    model = Nested()
    more = {"pair": (image(1), image(1, seed=1))}
    traced = featx.trace(model, [image(2), image(3)], more)
    other = [image(4, seed=5), image(4, seed=6)]
    assert same(traced(other, more), model(other, more))
    with pytest.raises(featx.SpecializationError):
        traced([*other, image()], more)


# -- modes and hooks ---------------------------------------------------------------------------------------------------


def test_hook_does_not_run_in_the_trace_and_runs_in_the_extractor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    calls: list[int] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(1) or output * 2)
    extractor = featx.create_feature_extractor(model, ["0", "1"], example_inputs=image())
    assert calls == []
    result = extractor(image())
    assert calls == [1]
    assert same(result["1"], model(image()))


class Modal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x + 1


def test_extractor_follows_the_mode_and_a_trace_is_of_one_mode() -> None:
    model = Modal()
    extractor = featx.create_feature_extractor(
        model, train_return_nodes={"mul": "y"}, eval_return_nodes={"add": "y"}, example_inputs=image(),
        suppress_diff_warning=True,
    )  # fmt: skip
    assert same(extractor.train()(image())["y"], image() * 2)
    assert same(extractor.eval()(image())["y"], image() + 1)
    assert model.training
    traced = featx.trace(model.eval(), image())
    assert same(traced.eval()(image()), image() + 1)
    with pytest.raises(featx.SpecializationError):
        traced.train()(image())


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.linear(x)
        with torch.no_grad():
            fixed = self.linear(x)
        return low, fixed, self.linear(x)


def test_autocast_and_no_grad_regions_hold_in_the_graph() -> None:
    traced = agree(Regions(), (image(),), (image(5),))
    low, fixed, free = traced(image())
    assert (low.dtype, fixed.dtype, free.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (low.requires_grad, fixed.requires_grad, free.requires_grad) == (True, False, True)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", [Shared, Slices])
def test_graph_runs_in_double_precision(kind: type[nn.Module]) -> None:
    model = kind()
    expected = kind().double()
    expected.load_state_dict(model.state_dict())
    assert same(featx.trace(model, image()).double()(image().double()), expected(image().double()))


def test_graph_that_read_a_dtype_refuses_another_one() -> None:
    traced = featx.trace(FactoryOfSize(), image())
    with pytest.raises(featx.SpecializationError):
        traced(image().double())


# -- extractors --------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * 2 if x.shape[0] > 3 and float(x.detach().sum()) > -1e9 else x + 1


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.blocks = nn.Sequential(Inner(), Inner())
        self.last = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(torch.relu(self.first(x))))


def test_module_that_nothing_is_asked_of_is_the_models_own_and_stays_alive() -> None:
    model = Outer()
    extractor = featx.create_feature_extractor(model, ["blocks", "relu"], example_inputs=image())
    assert extractor.blocks is model.blocks
    assert extractor.first is model.first
    assert not hasattr(extractor, "last")
    calls: list[int] = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    for batch in (2, 5):
        x = image(batch)
        hidden = torch.relu(model.first(x))
        expected = {"blocks": model.blocks(hidden), "relu": hidden}
        calls.clear()
        assert same(extractor(x), expected)
        assert calls == [1]


def test_extractor_keeps_the_residual_layer_of_a_resnet_whole() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18().eval()
    extractor = featx.create_feature_extractor(model, ["layer4"], example_inputs=torch.rand(2, 3, 32, 32))
    assert extractor.layer4 is model.layer4
    found: list[torch.Tensor] = []
    model.layer4.register_forward_hook(lambda module, args, output: found.append(output))
    x = torch.rand(2, 3, 64, 64)
    model(x)
    assert torch.equal(extractor(x)["layer4"], found[0])


def test_value_inside_a_default_leaf_can_be_asked_for() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    x = torch.randn(2, 3, 4)
    extractor = featx.create_feature_extractor(model.eval(), ["1.linear1"], example_inputs=x)
    found: list[torch.Tensor] = []
    layer.linear1.register_forward_hook(lambda module, args, output: found.append(output))
    model(x)
    assert torch.equal(extractor(x)["1.linear1"], found[0])


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


def test_extractor_says_which_dimensions_are_free() -> None:
    extractor = featx.create_feature_extractor(Loop(), ["add"], example_inputs=image(3))
    first, second = extractor.free_dims.of["x"]
    assert first.startswith("fixed")
    assert second == "free"


def test_node_of_a_trace_says_where_it_is_from_and_what_it_gave() -> None:
    model = Shared()
    node = next(node for node in featx.trace(model, image(3)).graph.nodes if node.name == "relu")
    assert tuple(node.meta["shape"]) == (3, 4)
    assert node.meta["dtype"] is torch.float32
    assert node.meta["qualified_name"] == "relu"
    file, _, line = node.meta["source"].rpartition(":")
    assert "torch.relu(self.first" in Path(file).read_text().splitlines()[int(line) - 1]


def test_functions_of_torch_are_as_before_after_a_trace() -> None:
    before = torch.relu, functional.relu, nn.Module.__call__, torch.is_grad_enabled, len
    featx.trace(Shared(), image())
    assert before == (torch.relu, functional.relu, nn.Module.__call__, torch.is_grad_enabled, len)
