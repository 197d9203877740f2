"""Buffers, statistics, generators, inputs and torch itself: as before after a trace, and written by a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agree, image, same
from torch import nn
from torch.nn import functional

import featx
from featx.errors import TraceError

Snapshot = Callable[[nn.Module], Any]


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


class Writing(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x)
        return x * 2


def add_and_set(x: torch.Tensor) -> None:
    x += 1
    x[:, 0] = 0


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "operators": add_and_set,
    "method": lambda x: x.add_(1),
    "view": lambda x: x.view(-1)[1:].mul_(3),
    "module": nn.ReLU(inplace=True),
    "function": lambda x: functional.relu(x, inplace=True),
    "out": lambda x: torch.add(x, 1, out=x),
    "copy": lambda x: x.copy_(torch.ones(4)),
    "draw": lambda x: x.uniform_(),
    "by value": lambda x: x.mul_(x.max().item()),
    "several": lambda x: torch._foreach_add_([x, x[:1]], 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_input_of_the_caller_is_unchanged_by_a_trace_and_written_by_a_run(name: str) -> None:
    model, x = Writing(WRITES[name]), image()
    traced = featx.trace(model, x)
    extractor = featx.create_feature_extractor(model, ["x", "mul"], example_inputs=x)
    assert torch.equal(x, image())
    one, other, third = image(), image(), image()
    torch.manual_seed(0)
    result = traced(one)
    torch.manual_seed(0)
    expected = model(other)
    torch.manual_seed(0)
    features = extractor(third)
    assert same(result, expected)
    assert same(features, {"x": image(), "mul": expected})
    assert same([one, third], [other, other])
    assert not torch.equal(one, image())


class WritingNested(nn.Module):
    def forward(self, xs: list[torch.Tensor], more: dict[str, torch.Tensor]) -> torch.Tensor:
        xs[0].add_(1)
        more["y"][:, 0] = xs[1][:, 0]
        return xs[0] + more["y"]


def test_nested_input_is_unchanged_by_a_trace_and_written_by_a_run() -> None:
    def inputs() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        return [image(), image(seed=1)], {"y": image(seed=2)}

    given, one, other = inputs(), inputs(), inputs()
    traced = featx.trace(WritingNested(), *given)
    assert same(given, inputs())
    assert same(traced(*one), WritingNested()(*other))
    assert same(one, other)
    assert not same(one, inputs())


def test_functions_of_torch_are_as_before_after_a_trace() -> None:
    before = torch.relu, functional.relu, nn.Module.__call__, torch.is_grad_enabled, len
    featx.trace(WritesState(), image())
    assert before == (torch.relu, functional.relu, nn.Module.__call__, torch.is_grad_enabled, len)


class KeepsASize(nn.Module):
    """Reads in the next call the number of rows that it keeps, or assigns it first."""

    def __init__(self, reads_first: bool) -> None:
        super().__init__()
        self.rows = 0
        self.reads_first = reads_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads_first and self.rows > 1:
            x = x * 2
        self.rows = x.shape[0]
        return x + self.rows


def test_size_that_forward_keeps_and_that_decides_in_the_next_call_is_fixed() -> None:
    model, x = KeepsASize(True), torch.ones(1, 3)
    traced = featx.trace(model, x)
    for _ in range(2):
        assert torch.equal(traced(x), model(x))
    with pytest.raises(featx.SpecializationError, match="its first call"):
        traced(torch.ones(4, 3))  # a second call with four rows would double them


def test_size_that_forward_keeps_and_that_changes_its_next_call_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="'rows'"):
        featx.trace(KeepsASize(True), torch.ones(4, 3))


def test_size_that_forward_keeps_and_assigns_anew_is_followed() -> None:
    model = KeepsASize(False)
    traced = featx.trace(model, torch.ones(1, 3))
    assert model.rows == 0
    assert torch.equal(traced(torch.ones(4, 3)), torch.full((4, 3), 5.0))


class ChangesALayer(nn.Module):
    """Assigns to an attribute of a layer of torch."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.drop, self.linear = rate, nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop.p = self.rate
        x = self.drop(self.linear(x))
        self.drop.p = 0.5
        return x


def test_attribute_of_a_layer_that_forward_changes_is_refused() -> None:
    for model in (ChangesALayer(0.25), ChangesALayer(0.25).eval()):
        with pytest.raises(TraceError, match="changes the attribute 'p' of or inside 'drop', which is kept whole"):
            featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4))


def test_attribute_of_a_layer_that_forward_sets_to_what_it_is_may_stay() -> None:
    model, x = ChangesALayer(0.5).eval(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    assert torch.equal(extractor(x)["output"], model(x))


class CannotBeFollowed(nn.Module):
    """Is kept whole, for its `try`, and goes by what the module around it has set."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.mask = nn.Linear(4, 4), 1.0, None
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale + self.shift
        y = y if self.mask is None else y * self.mask
        try:
            return y + y.sum()
        except RuntimeError:
            return y


class SetsOnAChild(nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.child, self.head, self.change = CannotBeFollowed(), nn.Linear(4, 2), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.child, x)
        return self.head(self.child(x))


SETS: list[Callable[[Any, torch.Tensor], None]] = [
    lambda child, x: setattr(child, "scale", 0.5),
    lambda child, x: setattr(child, "scale", x.shape[0]),
    lambda child, x: setattr(child, "mask", x > 0),
    lambda child, x: setattr(child, "shift", x.mean(0).detach()),
]


@pytest.mark.parametrize("change", SETS, ids=["number", "size", "tensor", "buffer"])
def test_what_is_set_on_a_module_that_stays_whole_is_refused(change: Callable[[Any, torch.Tensor], None]) -> None:
    for trace in (lambda model, x: featx.trace(model, x), lambda model, x: _output_of(model, x)):
        with pytest.raises(TraceError, match="of or inside 'child', which is kept whole"):
            trace(SetsOnAChild(change).eval(), torch.rand(2, 4))


class GoesByWhatIsSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows, self.calls, self.counts = nn.Linear(4, 4), 1, 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        return self.linear(x)[: self.rows] * (self.calls + 1)


class SetsRows(nn.Module):
    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.child, self.relu = GoesByWhatIsSet(), nn.ReLU()
        self.child.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.child.rows = 2
        return self.relu(self.child(x))


@pytest.mark.parametrize("node", ["child", "child.linear", "relu"])
def test_number_that_is_set_on_a_module_opens_it(node: str) -> None:
    model, expected = SetsRows(counts=False).eval(), dict[str, torch.Tensor]()
    extractor = featx.create_feature_extractor(model, [node], example_inputs=torch.rand(4, 4))
    assert model.child.rows == 1
    x = torch.rand(3, 4)
    model.get_submodule(node).register_forward_hook(lambda module, args, result: expected.update(y=result))
    model(x)
    assert torch.equal(extractor(x)[node], expected["y"])


def test_module_that_is_opened_for_what_is_set_on_it_may_not_count() -> None:
    with pytest.raises(TraceError, match=r"'child', which is kept whole .it runs other operations in a second call"):
        featx.create_feature_extractor(SetsRows(counts=True).eval(), ["relu"], example_inputs=torch.rand(4, 4))


def _output_of(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return featx.create_feature_extractor(model, ["output"], example_inputs=x)


class Rebuilds(nn.Module):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.linear, self.other, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.layers, self.change = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return self.layers(self.norm(self.other(self.linear(x))))


REBUILDS: dict[str, Callable[[Any], None]] = {
    "no bias": lambda model: setattr(model.linear, "bias", None),
    "tied": lambda model: setattr(model.other, "weight", model.linear.weight),
    "statistics": lambda model: setattr(model.norm, "running_mean", torch.ones(4)),
    "another layer": lambda model: model.layers.__setitem__(1, nn.GELU()),
    "one more": lambda model: model.layers.add_module("2", nn.Tanh()),
}


@pytest.mark.parametrize("change", REBUILDS)
def test_layers_that_forward_rebuilds_are_refused(change: str) -> None:
    for trace in (lambda model, x: featx.trace(model, x), _output_of):
        with pytest.raises(TraceError, match=r"forward replaces '\w+' of '\w+'"):
            trace(Rebuilds(REBUILDS[change]).eval(), torch.rand(3, 4))


def test_weights_that_are_tied_already_may_be_tied_in_forward() -> None:
    model, x = Rebuilds(REBUILDS["tied"]).eval(), torch.rand(3, 4)
    expected = model(x)
    assert torch.equal(_output_of(model, x)(x)["output"], expected)


class Context:
    """Its attributes are those of the class until somebody assigns them."""

    scale = 1.0


class ReadsContext(nn.Module):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.linear, self.context = nn.Linear(4, 4), context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.context.scale


class SetsContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.context = Context()
        self.reads = ReadsContext(self.context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.context.scale = x.shape[0] / 2
        return self.reads(x)


@pytest.mark.parametrize("nodes", [["output"], ["reads"], ["reads.linear", "output"]])
def test_objects_with_attributes_of_their_class_are_left_alone(nodes: list[str]) -> None:
    model, x = SetsContext().eval(), torch.rand(3, 4)
    traced, extractor = featx.trace(model, x), featx.create_feature_extractor(model, nodes, example_inputs=x)
    assert vars(model.context) == {}
    for other in (x, torch.rand(5, 4)):
        expected = copy.deepcopy(model)(other)
        assert torch.equal(traced(other), expected)
        assert torch.equal(extractor(other)[nodes[-1]], expected)


class NamesItsResult(nn.Module):
    """Keeps a value for whoever looks at the model, and returns it under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.embedding = self.backbone(x)
        outputs: dict[str, torch.Tensor] = {}
        outputs["embedding"] = self.embedding
        outputs["logits"] = self.head(self.embedding)
        return outputs


@pytest.mark.parametrize("name", ["backbone", "head", "output"])
def test_key_of_a_result_that_is_called_like_an_attribute_asks_for_none(name: str) -> None:
    model, x = NamesItsResult(), torch.rand(3, 4)
    found = featx.create_feature_extractor(model, [name], example_inputs=x)(x + 1)[name]
    expected = model(x + 1)
    embedding, logits = expected.values()
    pairs = zip(found.values(), (embedding, logits), strict=True) if name == "output" else ()
    assert all(torch.equal(*pair) for pair in pairs)
    assert name == "output" or torch.equal(found, embedding if name == "backbone" else logits)


class Structure(nn.Module):
    """Is not called; the model calls its methods, as that of Funnel does."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: int | None = None
        self.calls = 0

    def start(self) -> None:
        self.factor = 1

    def count(self) -> None:
        self.calls += 1

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        assert self.factor is not None
        self.factor *= 2
        return x[:, :: self.factor] * (1 + self.calls)


class CallsMethods(nn.Module):
    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.structure = Structure()
        self.linear = nn.Linear(4, 4)
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.structure.start()
        if self.counts:
            self.structure.count()
        return self.structure.pooled(self.structure.pooled(self.linear(x)))


@pytest.mark.parametrize("nodes", [["linear"], ["output"]])
def test_attribute_that_is_set_anew_on_a_module_that_is_not_called_is_no_state(nodes: list[str]) -> None:
    model = CallsMethods(counts=False).eval()
    extractor = featx.create_feature_extractor(model, nodes, example_inputs=torch.rand(2, 4))
    assert model.structure.factor is None
    for x in (torch.rand(2, 4), torch.rand(3, 4)):
        expected = model.linear(x) if nodes == ["linear"] else model(x)
        assert torch.equal(extractor(x)[nodes[0]], expected)


@pytest.mark.slow
def test_attribute_that_counts_on_a_module_that_is_not_called_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="second call"):
        featx.create_feature_extractor(CallsMethods(counts=True).eval(), ["output"], example_inputs=torch.rand(2, 4))


class ReadsStructure(nn.Module):
    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self.others = [structure]
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (self.others[0].factor or 3)


class SetsStructure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.structure = Structure()
        self.child = ReadsStructure(self.structure)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.structure.start()
        return self.child(x) + 1


@pytest.mark.parametrize("name", ["output", "child"])
def test_attribute_that_a_module_which_is_kept_whole_reads_elsewhere(name: str) -> None:
    model, x = SetsStructure().eval(), torch.rand(2, 4)
    try:
        extractor = featx.create_feature_extractor(model, [name], example_inputs=x)
    except featx.TraceError:
        return
    expected = model(x)
    assert torch.equal(extractor(x)[name] + (1 if name == "child" else 0), expected)
