"""What modules that are kept whole return of the model's own tensors, and what they write after a requested value."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 4)


class Pass(nn.Module):
    """Returns what it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class WritesWhatAModuleReturned(nn.Module):
    """A tensor of the model goes through a module and is written in place."""

    def __init__(self, through: nn.Module, kind: str) -> None:
        super().__init__()
        self.through = through
        if kind == "buffer":
            self.register_buffer("t", torch.ones(4))
        elif kind == "weight":
            self.t = nn.Parameter(torch.ones(4))
        else:
            self.t = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            t = self.through(self.t)
            t.mul_(2)
        return x * t


@pytest.mark.parametrize("kind", ["buffer", "weight", "tensor"])
@pytest.mark.parametrize("through", [nn.Identity, Pass, lambda: nn.Sequential(nn.Identity())])
def test_a_trace_does_not_write_what_a_module_returns_of_the_model(through: type[nn.Module], kind: str) -> None:
    model, eager = (WritesWhatAModuleReturned(through(), kind).eval() for _ in range(2))
    before = model.t._version
    featx.get_graph_node_names(model, example_inputs=X)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    assert torch.equal(model.t, torch.ones(4))
    assert model.t._version == before
    for _ in range(2):
        assert torch.equal(extractor(X)["output"], eager(X))


class BufferThroughIdentity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.ones(4))
        self.through = nn.Identity()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.through(self.m)
        z = x + y
        self.m.mul_(2)
        return z, y


@pytest.mark.parametrize("others", [[], ["add"], ["output"]])
def test_a_buffer_behind_an_identity_is_as_it_was(others: list[str]) -> None:
    extractor = featx.create_feature_extractor(BufferThroughIdentity().eval(), ["through", *others], example_inputs=X)
    first = extractor(X)["through"]
    assert torch.equal(first, torch.ones(4))
    assert torch.equal(extractor(X)["through"], torch.full((4,), 2.0))
    assert torch.equal(first, torch.ones(4))


class Keeps(nn.Module):
    """Returns its own buffer, or a part of it."""

    b: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(4))

    def forward(self, count: int | None = None) -> torch.Tensor:
        return self.b if count is None else self.b[:count]


class WritesABufferThatWasReturned(nn.Module):
    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.keeps, self.act, self.count = Keeps(), nn.ReLU(), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(x[:, : self.count] * self.keeps(self.count))
        self.keeps.b.mul_(2)
        return y


@pytest.mark.parametrize("count", [None, 3])
def test_a_write_to_a_buffer_that_a_module_has_returned_is_kept(count: int | None) -> None:
    model = WritesABufferThatWasReturned(count).eval()
    eager = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    for _ in range(3):
        assert torch.equal(extractor(X)["output"], eager(X))


class ReadsRunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm1d(4, momentum=0.5), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(x - self.norm.running_mean))


class Decay(nn.Module):
    def forward(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.mul_(0.9)


class DecaysItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.decay = nn.Linear(4, 4), nn.ReLU(), Decay()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.linear(x))
        self.decay(self.linear.weight)
        return y


class Meter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.m.add_(x.detach().mean(0))
        return x - self.m


class MetersInALoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.meter, self.layers = Meter(), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(self.meter(x))
        return x


class ReadsASpectralNormTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) @ self.linear.weight


WRITTEN_LATER: dict[str, tuple[type[nn.Module], str]] = {
    "statistics that the next call reads": (ReadsRunningMean, "act"),
    "a weight that a module gets": (DecaysItsWeight, "act"),
    "further calls of a module": (MetersInALoop, "layers.0"),
    "power iterations": (ReadsASpectralNormTwice, "act"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", WRITTEN_LATER)
def test_what_modules_write_behind_a_requested_value_is_kept(name: str, training: bool) -> None:
    kind, wanted = WRITTEN_LATER[name]
    torch.manual_seed(0)
    model = kind().train(training)
    eager = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, [wanted], example_inputs=X)
    seen: list[torch.Tensor] = []
    eager.get_submodule(wanted).register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    for _ in range(3):
        eager(X)
        assert torch.equal(extractor(X)[wanted], seen[-1])


@pytest.mark.parametrize("count", [None, 3])
def test_a_buffer_that_a_module_returns_is_as_it_was(count: int | None) -> None:
    model = WritesABufferThatWasReturned(count).eval()
    eager = copy.deepcopy(model)
    seen: list[torch.Tensor] = []
    name = next(name for name, module in eager.named_modules() if isinstance(module, Keeps))
    eager.get_submodule(name).register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    extractor = featx.create_feature_extractor(model, [name], example_inputs=X)
    for _ in range(3):
        eager(X)
        assert torch.equal(extractor(X)[name], seen[-1])


class MeanTeacher(nn.Module):
    """Moves its teacher by `data`, which cannot be followed, after the value that the teacher computes."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = self.act(self.teacher(x)).detach()
        for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.data = mine.data * 0.5 + other.data * 0.5
        return self.student(x) - target


@pytest.mark.slow
def test_weights_that_are_written_behind_the_end_of_a_trace_are_refused() -> None:
    model = MeanTeacher().eval()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(featx.TraceError, match=r"forward writes 'teacher\.\w+', which the requested nodes read"):
        featx.create_feature_extractor(model, ["act"], example_inputs=X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class KeepsAMean(nn.Module):
    """Its `view` fits two layouts, so that a wider image is tried, and it writes a buffer."""

    m: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("m", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        rows, channels, height, width = y.shape
        with torch.no_grad():
            self.m += y.mean((0, 2, 3))
        return y.flatten(2).transpose(1, 2).view(rows, height, width, channels) * self.m


@pytest.mark.slow
def test_gradients_that_are_pending_do_not_notice_that_an_extractor_is_made() -> None:
    model, x = KeepsAMean().eval(), torch.rand(2, 3, 4, 4)
    loss = (model.conv(x) * model.m[:, None, None]).sum()  # has saved the buffer
    featx.create_feature_extractor(model, ["view", "output"], example_inputs=x)
    featx.nodes(model, x)
    loss.backward()
    assert model.m._version == 0


class Momentum(nn.Module):
    """Two encoders, of which the second one follows the first one, as MoCo updates them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.query(x)
        with torch.no_grad():
            for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.data = own.data * 0.5 + other.data * 0.5
        return found * self.key(x)


def test_weights_that_the_requested_value_does_not_read_may_be_written_behind_it() -> None:
    model, x = Momentum(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["query"], example_inputs=x)
    for _ in range(2):
        expected = model.query(x)
        assert torch.equal(extractor(x)["query"], expected)
        model(x)
    with pytest.raises(featx.TraceError, match="'data' of a tensor is assigned"):
        featx.create_feature_extractor(model, ["key"], example_inputs=x)


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Bootstrapped(nn.Module):
    """Moves its target, a module of a class of its own, by `data` after the call of it, as BYOL does."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.online = Target(), Target()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target, online = self.target(x), self.online(x)
        self.target.gain.data = self.target.gain.data * 0.9 + online.mean() * 0.1
        return (target - online).pow(2)


@pytest.mark.slow
def test_weights_of_a_module_that_is_kept_whole_may_be_read_in_the_next_call() -> None:
    with pytest.raises(featx.TraceError, match=r"writes 'target\.gain', which the requested nodes read"):
        featx.create_feature_extractor(Bootstrapped().eval(), ["target"], example_inputs=torch.rand(2, 4))


class Reset(nn.Module):
    """Replaces or writes what its target holds, after the call of it, by what is no torch call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.target, self.how = Target(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.target(x)
        if self.how == "constant":
            self.target.gain.data = torch.full((4,), 3.0)
        elif self.how == "computed":
            self.target.gain.data = found.mean(0).detach()
        else:
            self.target.gain.detach().numpy()[...] = 4
        return found + 1


@pytest.mark.parametrize("how", ["constant", "computed", "numpy"])
def test_weights_may_be_given_other_values_without_a_call_that_fails(how: str) -> None:
    with pytest.raises(featx.TraceError, match=r"writes 'target\.gain', which the requested nodes read"):
        featx.create_feature_extractor(Reset(how).eval(), ["target"], example_inputs=torch.rand(2, 4))


class Steps(nn.Module):
    """Moves its own weights in each call, and is called by a model that asks for a number after it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.norm = nn.Parameter(torch.ones(4)), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gain.data = self.gain.data + x.mean(0).detach()
        return self.norm(x) * self.gain


class ScaledSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = Steps()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.steps(x)
        return found * found.sum().item()


@pytest.mark.parametrize("is_training", [False, True])
def test_what_the_own_calls_of_a_module_write_is_no_write_behind_them(is_training: bool) -> None:
    model = ScaledSteps().train(is_training)
    eager = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["steps"], example_inputs=torch.rand(2, 4)).train(is_training)
    for seed in range(3):
        x = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(extractor(x)["steps"], eager.steps(x))
