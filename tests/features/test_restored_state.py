"""What is put back where a graph turns out not to hold for an input: what was written, and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import featx


class Pools(nn.Module):
    """Has batch norm before the check that large images fail."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(nn.functional.avg_pool2d(x, 2) if x.shape[-1] > 16 else x)


def adaptive(model: nn.Module) -> nn.Module:
    return featx.create_feature_extractor(model, ["head"], example_inputs=torch.rand(1, 3, 12, 12), adaptive=True)


def test_backward_of_earlier_outputs_goes_on() -> None:
    model, image = Pools().eval(), torch.rand(1, 3, 32, 32)
    own, teacher = model(torch.rand(1, 3, 12, 12)).sum(), nn.Conv2d(3, 4, 1)
    of_teacher = teacher(image).sum()
    extractor = adaptive(model)
    both = extractor(torch.rand(1, 3, 12, 12))["head"].sum() + extractor(image)["head"].sum()
    for loss in (both, own, of_teacher):
        loss.backward()


@pytest.mark.slow
def test_inputs_that_cannot_be_written_are_taken() -> None:
    model = Pools().eval()
    for image in (torch.rand(1, 3, 32, 32).expand(4, -1, -1, -1), torch.rand(1, 1, 32, 32).expand(1, 3, 32, 32)):
        assert torch.equal(adaptive(model)(image)["head"], model(image))
    with torch.inference_mode():
        image = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(adaptive(model)(image)["head"], model(image))


def test_statistics_of_a_graph_that_did_not_hold_are_put_back() -> None:
    model, eager = Pools().train(), Pools().train()
    eager.load_state_dict(model.state_dict())
    extractor, image = adaptive(model), torch.rand(2, 3, 32, 32)
    assert torch.equal(extractor(image)["head"], eager(image))
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))


class Decides(nn.Module):
    """Decides by the values of an input, after batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(12, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.embed(tokens)))
        return x * 2 if counts.sum() > 4 else x + 1


@pytest.mark.parametrize("adaptive", [None, True])
def test_a_graph_that_ran_in_eval_mode_first_draws_in_train_mode_what_the_model_draws(adaptive: bool | None) -> None:
    tokens, few, many = torch.arange(3), torch.tensor([1, 2, 1]), torch.tensor([2, 1, 3])
    eager = Decides().eval()
    model = copy.deepcopy(eager)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(tokens, few), adaptive=adaptive)
    for training, counts in ((False, many), (True, few), (True, many), (False, many), (True, many)):
        eager.train(training)
        extractor.train(training)
        torch.manual_seed(0)
        expected = eager(tokens, counts)
        torch.manual_seed(0)
        assert torch.equal(extractor(tokens, counts)["output"], expected)
        assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))


def test_a_layer_that_is_put_into_train_mode_alone_draws_what_the_model_draws() -> None:
    tokens, few, many = torch.arange(3), torch.tensor([1, 2, 1]), torch.tensor([2, 1, 3])
    model = Decides().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(tokens, few))
    extractor(tokens, many)
    extractor.drop.train()
    for counts in (few, many, few):
        torch.manual_seed(0)
        expected = model(tokens, counts)
        torch.manual_seed(0)
        assert torch.equal(extractor(tokens, counts)["output"], expected)


class Teacher(nn.Module):
    """Is trained as in MoCo and BYOL: each call moves the weights of one layer towards those of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self) -> None:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.mul_(0.5).add_(other, alpha=0.5)


class Follows(nn.Module):
    """Calls such a module before a decision by a value, which goes another way from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Teacher()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pair()
        self.step += 1
        y, z = self.pair.student(x), self.pair.teacher(x)
        return y * z if self.step <= 2 else y + z


@pytest.mark.parametrize("leaves", [(), (Teacher,)], ids=["traced", "kept whole"])
def test_weights_that_a_graph_that_did_not_hold_has_written_are_put_back(leaves: tuple[type[nn.Module], ...]) -> None:
    model, x = Follows().train(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(
        model, ["output"], example_inputs=x, adaptive=True, tracer_kwargs={"leaf_modules": leaves}
    )
    for _ in range(4):
        assert torch.equal(extractor(x)["output"], eager(x))
        assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
    assert len(extractor.extractors) == 2


class Counts(nn.Module):
    """Keeps what it counts in attributes of all kinds, which decide what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.total, self.names = 0, [0], torch.zeros(()), {"last": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.names["last"] += 1
        self.total += 1
        return x * self.calls + sum(self.seen) + self.names["last"] + self.total


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.counts(x)
        return y * 2 if x.sum() > 0 else y + 1


def test_what_a_submodule_counts_in_python_is_put_back() -> None:
    model, x = ByValue().eval(), torch.rand(2, 4)
    eager = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["counts", "output"], example_inputs=x, adaptive=True)
    for each in (x, -x, x, -x):
        assert torch.equal(extractor(each)["output"], eager(each))
    assert len(extractor.extractors) == 2
    assert model.counts.seen == eager.counts.seen


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert_of, result = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = torch.where(expert_of == number)[0]
            if chosen.numel():
                result = result.index_add(0, chosen, expert(x[chosen]))
        return result


@pytest.mark.slow
def test_requested_module_that_does_not_run_for_an_input_is_named() -> None:
    torch.manual_seed(0)
    model = Experts().eval()
    extractor = featx.create_feature_extractor(
        model, ["experts.0", "experts.1", "experts.2"], example_inputs=torch.randn(64, 6), adaptive=True
    )
    with pytest.raises(
        featx.SpecializationError, match=r"'experts\.\d' was computed for an earlier input, and the model"
    ):
        extractor(torch.randn(1, 6))


class TakesSparse(nn.Module):
    """Has batch norm before a check, and a sparse input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = torch.sparse.mm(adjacency, x)
        y = self.norm(x)
        return self.head(y * 2 if x.sum() > 1e3 else y)


@pytest.mark.slow
def test_sparse_inputs_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model, eager = TakesSparse().train(), TakesSparse().train()
    eager.load_state_dict(model.state_dict())
    adjacency, x = torch.eye(4).to_sparse(), torch.rand(4, 3)
    extractor = featx.create_feature_extractor(model, ["head"], example_inputs=(x, adjacency), adaptive=True)
    for scale in (1, 1e6, 1):
        assert torch.equal(extractor(x * scale, adjacency)["head"], eager(x * scale, adjacency))
    assert torch.equal(adjacency.to_dense(), torch.eye(4))
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))


@pytest.mark.slow
def test_plain_tensor_of_the_model_itself_is_restored() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            y = self.layer(x) + self.calls
            return y * 2 if y.sum() > 0 else y

    model, alone = Counts().eval(), Counts().eval()
    alone.load_state_dict(model.state_dict())
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.rand(2, 4) + 9, adaptive=True)
    for scale in (1.0, -90.0, 50.0, -70.0):
        x = torch.rand(2, 4) * scale
        assert torch.equal(extractor(x)["output"], alone(x))
    assert torch.equal(model.calls, alone.calls)
