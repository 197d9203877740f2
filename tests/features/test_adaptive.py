"""AdaptiveExtractor: for any input what the model computes, with one graph for each case that it distinguishes."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

import featx


class BySize(nn.Module):
    """Pads narrow inputs, and has a part that only wide ones need."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv1d(2, 3, 1), nn.Conv1d(3, 3, 3)
        self.last = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.shape[-1] > 8:
            x = self.wide(x)
        return self.last(x)


class ByValue(nn.Module):
    """Counts batches, draws, and overwrites its input, all before a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.last = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x = self.drop(self.norm(x))
        if x.sum() > 0:
            return self.last(x * 2)
        return self.last(x - 1)


def adaptive(model: nn.Module, example: Any) -> featx.AdaptiveExtractor:
    extractor = featx.create_feature_extractor(
        model, ["last"], example_inputs=example, suppress_diff_warning=True, adaptive=True
    )
    assert isinstance(extractor, featx.AdaptiveExtractor)
    return extractor


def feature(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a hook sees."""
    seen: list[torch.Tensor] = []
    handle = model.get_submodule("last").register_forward_hook(lambda m, args, output: seen.append(output.clone()))
    model(x)
    handle.remove()
    return seen[0]


def test_input_of_another_case_is_traced_once_and_gives_what_the_model_gives() -> None:
    model = BySize()
    extractor = adaptive(model, torch.rand(1, 2, 4))
    for width, graphs in ((5, 1), (12, 2), (20, 2), (3, 2)):
        x = torch.rand(2, 2, width)
        assert torch.equal(extractor(x)["last"], feature(model, x))
        assert len(extractor.extractors) == graphs


def test_without_it_the_same_input_raises() -> None:
    extractor = featx.create_feature_extractor(BySize(), ["last"], example_inputs=torch.rand(1, 2, 4))
    with pytest.raises(featx.SpecializationError):
        extractor(torch.rand(2, 2, 12))


def test_it_has_the_weights_of_the_model_under_the_same_keys() -> None:
    model = BySize()
    extractor = adaptive(model, torch.rand(1, 2, 4))
    assert list(extractor.state_dict()) == list(model.state_dict())
    assert [id(weight) for weight in extractor.parameters()] == [id(weight) for weight in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_graph_that_fails_late_leaves_nothing_behind(training: bool) -> None:
    model = ByValue().train(training)
    reference = copy.deepcopy(model)
    extractor = adaptive(model, torch.full((4, 3), 5.0))
    for seed in range(12):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        inputs = x.clone(), x.clone()
        torch.manual_seed(seed)
        expected = feature(reference, inputs[0])
        torch.manual_seed(seed)
        assert torch.equal(extractor(inputs[1])["last"], expected)
        assert torch.equal(*inputs)
        for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
            assert torch.equal(ours, theirs)
    assert len(extractor.extractors) == 2


def test_it_follows_modes_dtypes_and_copies() -> None:
    model = BySize()
    extractor = adaptive(model, torch.rand(1, 2, 4))
    extractor(torch.rand(1, 2, 12))
    copies = (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor)))
    for copied in (extractor, *copies):
        for training in (True, False):
            x = torch.rand(2, 2, 12)
            assert copied.train(training).training is training
            assert torch.equal(copied(x)["last"], feature(model, x))
    extractor.double()
    for width in (4, 12):
        x = torch.rand(2, 2, width, dtype=torch.float64)
        assert torch.equal(extractor(x)["last"], feature(model, x))


def test_model_keeps_its_own_train() -> None:
    class Frozen(BySize):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.first.eval()
            return self

    model = Frozen()
    adaptive(model, torch.rand(1, 2, 4)).train()
    assert not model.first.training
    assert model.last.training


def test_error_of_the_model_itself_comes_through() -> None:
    extractor = adaptive(BySize(), torch.rand(1, 2, 4))
    with pytest.raises(RuntimeError, match="expected input"):
        extractor(torch.rand(1, 5, 4))


def test_symbolic_tracer_cannot_adapt() -> None:
    with pytest.raises(featx.ArgumentTypeError, match="follows none"):
        featx.create_feature_extractor(BySize(), ["last"], tracer="symbolic", adaptive=True)


def test_it_says_what_it_returns() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU())
    x = torch.rand(2, 3, 16, 24)
    extractor = featx.create_feature_extractor(model, {"1": "map"}, example_inputs=x, adaptive=True)
    (info,) = extractor.feature_info
    assert (info.key, info.shape, info.channels, info.stride) == ("map", tuple(extractor(x)["map"].shape), 4, 2)
    assert extractor.eval().feature_info.channels() == [4]


class Counting(nn.Module):
    """Counts its calls in a buffer, on which the result depends, and has a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = x * self.calls
        return y.relu() if x.shape[-1] > 8 else y


@pytest.mark.parametrize("convert", [nn.Module.double, lambda module: module.to_empty(device="cpu")])
def test_graphs_share_buffers_after_a_conversion(convert: Any) -> None:
    model = Counting().eval()
    extractor = featx.create_feature_extractor(
        model, {"output": "last"}, example_inputs=torch.rand(1, 2, 4), adaptive=True
    )
    for width in (4, 12):
        extractor(torch.rand(1, 2, width))
    assert len(extractor.extractors) == 2
    convert(extractor)
    model.calls.zero_()
    for calls, width in enumerate((4, 12, 4, 12), 1):
        x = torch.rand(1, 2, width, dtype=model.calls.dtype)
        assert torch.equal(extractor(x)["last"], x * calls)
    assert model.calls == 4


class Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 0.5, mode: str = "sum", k: int | None = None) -> torch.Tensor:
        y = self.linear(x) * scale
        return getattr(y if k is None else y[:, :k], mode)(-1)


@pytest.mark.parametrize("first", [{}, {"scale": 0.25}])
@pytest.mark.parametrize("option", [{"scale": 0.75}, {"mode": "mean"}, {"k": 2}])
@pytest.mark.parametrize("by_name", [True, False])
def test_an_option_holds_for_its_call_alone(first: dict[str, Any], option: dict[str, Any], by_name: bool) -> None:
    model, x = Options(), torch.randn(3, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs={"x": x, **first}, adaptive=True)
    given = {"scale": 0.5, "mode": "sum", "k": None, **first, **option}
    for _ in range(2):
        found = extractor(x=x, **option) if by_name else extractor(x, *given.values())
        assert torch.equal(found["output"], model(x, **given))
        # What the first example has chosen is the default of the extractor.
        assert torch.equal(extractor(x)["output"], model(x, **first))


class HasAListAsDefault(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factors: Any = [1.0, 0.5], options: Any = dict()) -> torch.Tensor:  # noqa: B006, C408
        x = x * 2 if x.shape[0] > 4 else x
        return self.linear(x, **options) * (sum(factors) if factors else 5)


def test_a_list_as_default_is_that_of_the_model_in_each_graph() -> None:
    model, x = HasAListAsDefault().eval(), torch.rand(6, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x, adaptive=True)
    for inputs in ((x,), (x[:3],), (x, [2.0]), (x[:3], None), (x[:2],)):
        assert torch.equal(extractor(*inputs)["output"], model(*inputs))
    fixed = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    with pytest.raises(featx.SpecializationError, match="input 'factors'"):
        fixed(x, factors=None)


def test_the_graphs_that_ran_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByText(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, text: str) -> torch.Tensor:
            return self.last(x * len(text))

    monkeypatch.setattr("featx.features.adaptive._MOST", 3)
    model, x = ByText().eval(), torch.rand(2, 4)
    extractor = adaptive(model, (x, "a"))
    made: list[str] = []
    for text in "bcbdbeba":
        before = extractor.extractors
        assert torch.equal(extractor(x, text)["last"], model(x, text))
        assert len(extractor.extractors) <= 3
        made += [text] if extractor.extractors[-1] not in before else []
    assert extractor.extractors[0].meta["example"].args[1] == "a"
    assert made == list("bcde")


def test_free_dims_are_those_of_the_first_graph() -> None:
    model = BySize().eval()
    extractor = adaptive(model, torch.rand(2, 2, 12))
    fixed = featx.create_feature_extractor(model, ["last"], example_inputs=torch.rand(2, 2, 12), adaptive=False)
    extractor(torch.rand(2, 2, 6))  # makes another graph
    assert str(extractor.free_dims) == str(fixed.eval().free_dims)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        scores = self.head(self.body(x).relu())
        if self.training:
            assert targets is not None, "train mode needs targets"
            return {"loss": nn.functional.cross_entropy(scores, targets)}
        return {"scores": scores.softmax(-1)}


@pytest.mark.slow
def test_inputs_of_eval_mode_need_no_targets() -> None:
    model, x, targets = WithLoss().eval(), torch.rand(3, 3), torch.tensor([0, 1, 1])
    extractor = featx.create_feature_extractor(
        model, train_return_nodes=["cross_entropy"], eval_return_nodes=["softmax"], example_inputs=(x, targets),
        adaptive=True, suppress_diff_warning=True,
    )  # fmt: skip
    assert torch.equal(extractor(x)["softmax"], model(x)["scores"])
    extractor.train()
    with pytest.raises(featx.TraceError, match="train mode needs targets"):
        extractor(x)
    assert torch.equal(extractor(x, targets)["cross_entropy"], model(x, targets)["loss"])


class NamesALayerAsItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.x = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        y = self.first(x)
        return self.x(y) if both else y


def test_name_of_a_layer_that_does_not_run_is_not_that_of_an_input() -> None:
    model, x = NamesALayerAsItsInput(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["x"], example_inputs=x, adaptive=True)
    assert torch.equal(extractor(x)["x"], model(x))
    with pytest.raises(featx.SpecializationError, match="was computed for an earlier input"):
        extractor(x, both=False)
    with pytest.raises(featx.NodeNameError, match="a module that does not run"):
        featx.create_feature_extractor(model, ["x"], example_inputs=(x, False))


@pytest.mark.parametrize(
    "change",
    [
        lambda extractor: setattr(extractor, "head", nn.Linear(2, 2)),
        lambda extractor: setattr(extractor, "weight", nn.Parameter(torch.rand(2))),
        lambda extractor: setattr(extractor, "0", None),
        lambda extractor: delattr(extractor, "0"),
        lambda extractor: extractor.add_module("head", nn.Linear(2, 2)),
        lambda extractor: extractor.register_parameter("weight", None),
        lambda extractor: extractor.register_buffer("steps", torch.zeros(1)),
    ],
)
def test_its_parts_are_the_models_and_cannot_be_changed(change: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    extractor = featx.create_feature_extractor(model, ["0"], example_inputs=torch.rand(1, 2), adaptive=True)
    parts = {name: dict(vars(model)[name]) for name in ("_modules", "_parameters", "_buffers")}
    with pytest.raises(featx.RequestError, match="the parts of this extractor are those of Sequential"):
        change(extractor)
    assert parts == {name: vars(model)[name] for name in parts}
    extractor.note = 3
    del extractor.note


def test_it_says_what_it_returns_as_other_extractors_do() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    extractor = featx.create_feature_extractor(
        model, ["layer1", "layer2"], example_inputs=torch.rand(1, 3, 64, 64), adaptive=True
    )
    assert extractor.channels == [64, 128]
    assert extractor.strides == [4, 8]
    for name in ("graph", "code", "to_folder"):
        assert not hasattr(extractor, name)
        with pytest.raises(AttributeError, match=rf"take extractors\[0\]\.{name}"):
            getattr(extractor, name)


def test_parts_of_the_model_come_before_what_it_says_of_its_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.channels = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.channels(x)

    model = Model()
    extractor = featx.create_feature_extractor(model, ["channels"], example_inputs=torch.rand(1, 2), adaptive=True)
    assert extractor.channels is model.channels


def test_what_a_tokenizer_returns_is_taken_as_it_is() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            x = self.table(input_ids)
            if attention_mask is not None:
                x = x * attention_mask[..., None]
            return self.last(x)

    model, ids = Text().eval(), torch.randint(0, 9, (2, 5))
    extractor = featx.create_feature_extractor(model, ["last"], example_inputs={"input_ids": ids})
    for batch in (UserDict(input_ids=ids), UserDict(attention_mask=torch.zeros(2, 5), input_ids=ids)):
        assert torch.equal(extractor(batch)["last"], model(**batch))
