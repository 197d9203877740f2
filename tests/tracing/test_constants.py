"""RealTensors: what a model computes from its own tensors and from literals is part of the graph, and runs there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx

X = torch.tensor([1.0, 2.0, 3.0])


class Model(nn.Module):
    """Has buffers, a parameter and a plain tensor, and runs the function it is given."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("buffer", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("other", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.weight = nn.Parameter(torch.tensor([1.0, -1.0, 1.0]))
        self.plain = torch.tensor([5.0, 6.0, 7.0])

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def traced_beside_eager(function: Callable[..., Any]) -> tuple[featx.GraphModule, Model]:
    """Return a traced model and an untouched twin, after checking that the trace left the first as it was."""
    model, twin = Model(function), Model(function)
    traced = featx.symbolic_trace(model)
    for (name, value), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert isinstance(value, torch.Tensor), name
        assert torch.equal(value, other), name
    return traced, twin


def assert_equal_over_calls(function: Callable[..., Any]) -> featx.GraphModule:
    """Compare a traced model with its twin over three calls: results, and the buffers that both have then."""
    traced, twin = traced_beside_eager(function)
    for seed, x in enumerate([X, X * 2, X - 4]):
        torch.manual_seed(seed)
        result = traced(x.clone())
        torch.manual_seed(seed)
        assert torch.equal(result, twin(x.clone())), f"call {seed}"
    theirs = dict(twin.named_buffers())
    for name, value in traced.named_buffers():
        if not name.startswith("_tensor_constant"):
            assert torch.equal(value, theirs[name]), name
    return traced


# -- reads -------------------------------------------------------------------------------------------------------------


def test_buffer_that_is_used_directly_is_a_get_attr_node() -> None:
    traced, _ = traced_beside_eager(lambda model, x: x + model.buffer)
    assert [node.target for node in traced.graph.nodes if node.op == "get_attr"] == ["buffer"]


READS: dict[str, Callable[[Any, Any], Any]] = {
    "method": lambda model, x: x * model.buffer.sum(),
    "chain": lambda model, x: x + (model.buffer * 2 + 1).relu().flip(0),
    "function": lambda model, x: x + torch.cumsum(model.buffer, 0),
    "functional": lambda model, x: functional.linear(x, functional.normalize(model.buffer[None])),
    "item of a tuple": lambda model, x: x + model.buffer.max(0).values + model.buffer.max(0)[1],
    "split": lambda model, x: x + torch.cat(model.buffer.split(2)),
    "attribute": lambda model, x: x + model.buffer[None].T[:, 0],
    "two buffers": lambda model, x: x + torch.stack([model.buffer, model.other]).sum(0),
    "keyword": lambda model, x: x + torch.add(input=model.buffer, other=model.other, alpha=2),
    "plain attribute": lambda model, x: x + model.plain * 2,
    "parameter with buffer": lambda model, x: x + model.weight * model.buffer,
    "shape": lambda model, x: x.view(model.buffer.shape[0], -1)[:, 0] + len(model.buffer),
    "detach": lambda model, x: x + model.buffer.detach(),
    "index": lambda model, x: x[(model.buffer - 1).long()],
    "only the buffer": lambda model, x: model.buffer * 2,
    "no computation": lambda model, x: model.buffer,
}


@pytest.mark.parametrize("name", READS)
def test_computation_on_a_buffer_gives_what_eager_gives(name: str) -> None:
    assert_equal_over_calls(READS[name])


@pytest.mark.parametrize("name", [name for name in READS if name not in ("shape", "plain attribute")])
def test_later_change_of_the_buffer_shows(name: str) -> None:
    traced, twin = traced_beside_eager(READS[name])
    with torch.no_grad():
        for module in (traced, twin):
            module.buffer.copy_(torch.tensor([3.0, 1.0, 2.0]))
    assert torch.equal(traced(X), twin(X))


def test_later_change_of_a_parameter_shows() -> None:
    traced, twin = traced_beside_eager(lambda model, x: x + (model.weight.detach() * 2))
    with torch.no_grad():
        traced.weight.fill_(9)
        twin.weight.fill_(9)
    assert torch.equal(traced(X), twin(X))


def test_computation_that_meets_no_traced_value_is_not_in_the_graph() -> None:
    traced, _ = traced_beside_eager(lambda model, x: (model.buffer * 2, x)[1])
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "output"]


def test_computation_that_is_used_twice_runs_once() -> None:
    def function(model: Model, x: Any) -> Any:
        doubled = model.buffer * 2
        return (x + doubled) * doubled

    traced = assert_equal_over_calls(function)
    assert sum(node.name.startswith("mul") for node in traced.graph.nodes) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: x if model.buffer.sum() > 0 else -x,
        lambda model, x: x * model.buffer[0].item(),
        lambda model, x: x[: int(model.buffer[0])],
        lambda model, x: x * model.buffer.tolist()[0],
        lambda model, x: x if torch.equal(model.buffer, model.other) else -x,
        lambda model, x: x if 3.0 in model.buffer else -x,
    ],
)
def test_decision_by_the_values_of_a_buffer_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(featx.ControlFlowError, match="parameter or buffer decide"):
        featx.symbolic_trace(Model(function))


def add_item(total: torch.Tensor, x: Any) -> None:
    total[0] = x[0]


@pytest.mark.parametrize(
    "write",
    [
        lambda total, x: total.add_(x),
        lambda total, x: total[:2].copy_(x[:2]),
        lambda total, x: torch.add(x, 1, out=total),
        add_item,
    ],
)
@pytest.mark.parametrize(
    "read", [lambda total: bool(total.sum() > 0), lambda total: total[0].item(), lambda total: total.max().tolist()]
)
def test_decision_by_a_tensor_that_the_input_was_written_into_is_refused(
    write: Callable[..., Any], read: Callable[..., Any]
) -> None:
    # During the trace it still has the values that it was made with.
    def function(x: Any) -> Any:
        total = torch.zeros(3)
        write(total, x)
        return x if read(total) else -x

    with pytest.raises(featx.ControlFlowError):
        featx.symbolic_trace(function)


def test_parameter_that_the_model_does_not_own_is_refused() -> None:
    foreign = nn.Parameter(torch.ones(3))
    with pytest.raises(featx.ModulePathError, match=r"nn\.ModuleList"):
        featx.symbolic_trace(Model(lambda model, x: x + foreign))


# -- writes ------------------------------------------------------------------------------------------------------------


def add_one(model: Model, x: Any) -> Any:
    model.count.add_(1)
    return x + model.count


def augmented(model: Model, x: Any) -> Any:
    model.count += 1
    return x + model.count


def rebound(model: Model, x: Any) -> Any:
    model.count = model.count + 1
    return x + model.count


def item_assigned(model: Model, x: Any) -> Any:
    model.buffer[0] = 7.0
    return x + model.buffer


def view_written(model: Model, x: Any) -> Any:
    model.buffer[1:].mul_(2)
    return x + model.buffer


def detached_written(model: Model, x: Any) -> Any:
    model.buffer.detach().add_(1)
    return x + model.buffer


def out_argument(model: Model, x: Any) -> Any:
    torch.add(model.buffer, 1, out=model.other)
    return x + model.other


def written_from_input(model: Model, x: Any) -> Any:
    model.other.copy_(x)
    return x + model.other * 2


def moving_average(model: Model, x: Any) -> Any:
    model.buffer.mul_(0.5).add_(x.mean() * 0.5)
    return x - model.buffer


def read_before_and_after_a_write(model: Model, x: Any) -> Any:
    before = model.buffer * 2
    model.buffer.add_(1)
    return x + before + model.buffer * 2


def read_before_a_write_of_the_input(model: Model, x: Any) -> Any:
    before = model.buffer * 2
    model.buffer.copy_(x)
    return x + before


def read_before_an_item_is_written(model: Model, x: Any) -> Any:
    before = model.buffer.clone()
    model.buffer[0] = x[1]
    return before + x


def read_through_a_view_after_a_write(model: Model, x: Any) -> Any:
    view = model.buffer[:2]
    model.buffer.add_(x)
    return view * x[:2]


def write_that_nobody_reads(model: Model, x: Any) -> Any:
    model.count.add_(1)
    return x * 2


WRITES = [
    add_one,
    augmented,
    item_assigned,
    view_written,
    detached_written,
    out_argument,
    written_from_input,
    moving_average,
    read_before_and_after_a_write,
    read_before_a_write_of_the_input,
    read_before_an_item_is_written,
    read_through_a_view_after_a_write,
    write_that_nobody_reads,
]


@pytest.mark.parametrize("function", WRITES, ids=lambda function: function.__name__)
def test_write_into_a_buffer_happens_when_the_graph_runs_and_not_during_the_trace(function: Callable[..., Any]) -> None:
    assert_equal_over_calls(function)


def test_rebinding_a_buffer_is_recorded_or_refused_but_never_lost() -> None:
    model = Model(rebound)
    try:
        traced = featx.symbolic_trace(model)
    except featx.TraceError:
        traced = None
    assert int(model.count) == 0
    if traced is not None:
        assert_equal_over_calls(rebound)


# -- random draws ------------------------------------------------------------------------------------------------------


DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "rand": lambda model, x: x + torch.rand(3),
    "randn": lambda model, x: x + torch.randn(3, dtype=torch.float32),
    "randperm": lambda model, x: x[torch.randperm(3)],
    "randint": lambda model, x: x + torch.randint(0, 10, (3,)),
    "normal": lambda model, x: x + torch.normal(0.0, 1.0, (3,)),
    "like the input": lambda model, x: x + torch.rand_like(x),
    "like a buffer": lambda model, x: x + torch.rand_like(model.buffer),
    "written into a new tensor": lambda model, x: x + torch.empty(3).uniform_(),
    "probabilities in a buffer": lambda model, x: x + torch.bernoulli(torch.sigmoid(model.buffer)),
    "dropout of a buffer": lambda model, x: x + functional.dropout(model.buffer, 0.5),
    "sized by the input": lambda model, x: x + torch.rand(x.shape[0]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_draw_is_made_anew_in_each_run(name: str) -> None:
    assert_equal_over_calls(DRAWS[name])


def test_draws_keep_their_order() -> None:
    def function(model: Model, x: Any) -> Any:
        first = torch.rand_like(model.buffer)
        second = torch.rand(3)
        third = torch.rand_like(x)
        return third - second * first

    assert_equal_over_calls(function)


def test_draw_from_a_generator_is_never_frozen() -> None:
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    try:
        traced = featx.symbolic_trace(lambda x: x + torch.rand(3, generator=generator))
    except featx.FeatxError:
        traced = None
    assert torch.equal(generator.get_state(), state)
    if traced is not None:
        assert not torch.equal(traced(X), traced(X))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_during_the_trace_do_not_move_the_generator(name: str) -> None:
    before = torch.get_rng_state()
    featx.symbolic_trace(Model(DRAWS[name]))
    assert torch.equal(torch.get_rng_state(), before)


# -- literals ----------------------------------------------------------------------------------------------------------


def accumulate(model: Model, x: Any) -> Any:
    total = torch.zeros(3)
    total += x
    total.add_(1)
    return total


def fill_items(model: Model, x: Any) -> Any:
    total = torch.zeros(3)
    total[0] = x[1]
    total[1:] += x[:2]
    return total


def fill_a_view(model: Model, x: Any) -> Any:
    total = torch.zeros(3)
    total[:2].copy_(x[:2])
    return total


def fill_through_a_view_of_a_view(model: Model, x: Any) -> Any:
    total = torch.zeros(3, 1)
    column = total.view(-1)
    column[1:].add_(x[1:])
    return total


def out_of_a_function(model: Model, x: Any) -> Any:
    total = torch.zeros(3)
    torch.add(x, total, out=total)
    return total


def written_between_uses(model: Model, x: Any) -> Any:
    ones = torch.zeros(3)
    before = x + ones
    ones.add_(1)
    return before * 2 + ones


def written_by_functional(model: Model, x: Any) -> Any:
    literal = torch.full((3,), -1.0)
    literal -= x
    functional.relu(literal, inplace=True)
    return literal


def literal_read_only(model: Model, x: Any) -> Any:
    return x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3)


def mask_built_by_constants(model: Model, x: Any) -> Any:
    mask = torch.zeros(3)
    mask[0] = 1
    return x.masked_fill(mask.bool(), 0.0)


LITERALS = [
    accumulate,
    fill_items,
    fill_a_view,
    fill_through_a_view_of_a_view,
    out_of_a_function,
    written_between_uses,
    written_by_functional,
    literal_read_only,
    mask_built_by_constants,
]


@pytest.mark.parametrize("function", LITERALS, ids=lambda function: function.__name__)
def test_literal_tensor_is_new_in_each_call(function: Callable[..., Any]) -> None:
    assert_equal_over_calls(function)


@pytest.mark.parametrize("function", LITERALS, ids=lambda function: function.__name__)
def test_result_of_one_call_is_not_overwritten_by_the_next(function: Callable[..., Any]) -> None:
    traced, twin = traced_beside_eager(function)
    first = traced(X)
    traced(X * 5)
    assert torch.equal(first, twin(X))


def test_factory_sized_by_the_input_follows_the_input() -> None:
    traced = featx.symbolic_trace(lambda x: x + torch.arange(x.shape[0]))
    assert torch.equal(traced(torch.zeros(5)), torch.arange(5.0))


@pytest.mark.parametrize("traced", [True, False])
def test_assignment_to_data_is_refused(traced: bool) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.data = self.mean * 0.9 + (x.mean(0) if traced else 1)
            return x - self.mean

    with pytest.raises(featx.TraceError, match="assigns to 'data' of mean"):
        featx.symbolic_trace(Average())
