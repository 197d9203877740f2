"""Calls of several kinds in a row: an extractor has the values of a model that had the same calls, or it refuses."""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import featx

X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) - 0.5
MASK = torch.tensor([[1.0], [0.0], [1.0]])


class Mode(enum.Enum):
    PLAIN = 1
    MASKED = 2


class Leaves(nn.Module):
    """Leaves something in `kept` where a mask is given, and goes by it where none is."""

    def __init__(self, first: Any, then: Callable[[Any, Tensor], Any], use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept, self.then, self.use = first, then, use
        if first == "modules":
            self.kept = (self.one,)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if mask is not None:
            x = x * mask
            self.kept = self.then(self, x)
            return x
        return self.use(x, self.kept)


def doubled_if(is_so: Callable[[Any], bool]) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, kept: x * 2 if is_so(kept) else x + 1


KINDS: dict[str, tuple[Any, Callable[[Any, Tensor], Any], Callable[[Tensor, Any], Tensor]]] = {
    "enum": (Mode.PLAIN, lambda model, x: Mode.MASKED, doubled_if(lambda kept: kept is Mode.MASKED)),
    "dtype": (None, lambda model, x: x.dtype, doubled_if(lambda kept: kept is not None)),
    "function": (functional.relu, lambda model, x: functional.gelu, lambda x, kept: kept(x)),
    "partial": (None, lambda model, x: functools.partial(torch.mul, other=2), lambda x, kept: kept(x) if kept else x),
    "tuple": (("a",), lambda model, x: ("b",), doubled_if(lambda kept: kept == ("b",))),
    "list": (["a"], lambda model, x: ["b"], doubled_if(lambda kept: kept == ["b"])),
    "dict": ({"scale": 1}, lambda model, x: {"scale": 2}, lambda x, kept: x * kept["scale"]),
    "object": (None, lambda model, x: SimpleNamespace(value=x.mean()), lambda x, kept: x * kept.value if kept else x),
    "number of numpy": (None, lambda model, x: numpy.float64(2.0), lambda x, kept: x * kept if kept else x + 1),
    "modules": ("modules", lambda model, x: (model.two,), lambda x, kept: kept[0](x)),
}  # fmt: skip


def refuses_or_agrees(extractor: nn.Module, model: nn.Module, calls: list[dict[str, Any]]) -> bool:
    """Run the calls; say whether one was refused. Before that all values are those of the model."""
    for call in calls:
        try:
            found = extractor(**call)["output"]
        except featx.TraceError:
            return True
        assert torch.equal(found, model(**call))
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_left_is_compared(kind: str) -> None:
    torch.manual_seed(0)
    model = Leaves(*KINDS[kind]).eval()
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs={"x": X}, adaptive=True)
    assert refuses_or_agrees(extractor, reference, [{"x": X}, {"x": X, "mask": MASK}, {"x": X}])


class OtherKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.store = nn.Linear(4, 4), dict[str, Tensor]()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if mask is not None:
            self.store["mask"] = mask * 2
            return x * mask
        self.store["feature"] = x
        return x * self.store["mask"] if "mask" in self.store else x - 1


class AtTheEnd(nn.Module):
    """Does more after all that the other call does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if mask is not None:
            self.seen = True
            return x * mask
        if self.seen:
            x = self.extra(x)
        return x


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.current, self.last = nn.Linear(4, 4), "plain", "plain"

    def forward(self, x: Tensor, mask: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if mask is not None:
            self.current = "masked"
            return x * mask
        if shift is not None:
            self.last = self.current
            return x + shift
        return x * 2 if self.last == "masked" else x - 1


class ReadsConfig(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.linear = config, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.config.mode == "plain" else x.relu()


class SharesConfig(nn.Module):
    """A part that is kept whole reads what forward has left in an object that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(mode="plain")
        self.part = ReadsConfig(self.config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            self.config.mode = "masked"
            return x * mask
        return self.part(x)


@pytest.mark.slow
@pytest.mark.parametrize("build", [OtherKeys, AtTheEnd, Chained, SharesConfig])
def test_calls_that_read_what_others_have_left_are_refused(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build().eval()
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs={"x": X}, adaptive=True)
    calls = [{"x": X}, {"x": X, "mask": MASK}, {"x": X}]
    if build is Chained:
        calls.insert(2, {"x": X, "shift": torch.ones(())})
    assert refuses_or_agrees(extractor, reference, calls)


def test_inputs_that_the_caller_fills_anew_do_not_change_what_is_compared() -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4), False

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.linear(x)
            if mask is not None:
                if mask.sum() < 3:
                    self.seen = True
                return x * mask
            return x * 2 if self.seen else x - 1

    torch.manual_seed(0)
    model = Seen().eval()
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs={"x": X}, adaptive=True)
    mask = MASK.clone()
    refused = refuses_or_agrees(extractor, reference, [{"x": X, "mask": mask}])
    mask.fill_(1)
    assert refused or refuses_or_agrees(extractor, reference, [{"x": X}])


class Trained(nn.Module):
    """Leaves a tensor in train mode with a mask, and reads it in eval mode: in an attribute, or in a buffer."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.linear, self.is_buffer, self.kept = nn.Linear(4, 4), is_buffer, torch.zeros(4)
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if self.training and mask is not None:
            if self.is_buffer:
                self.center.lerp_(x.detach().mean(0), 0.5)
            else:
                self.kept = x.detach().mean(0)
        if self.training:
            return x
        return x - (self.center if self.is_buffer else self.kept)


@pytest.mark.parametrize("adaptive", [None, True])
@pytest.mark.parametrize("is_buffer", [False, True])
def test_what_a_further_case_of_one_mode_leaves_for_the_other_one(is_buffer: bool, adaptive: bool | None) -> None:
    torch.manual_seed(0)
    model = Trained(is_buffer).eval()
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(
        model, ["output"], example_inputs={"x": X}, adaptive=adaptive, suppress_diff_warning=True
    )
    assert not refuses_or_agrees(extractor, reference, [{"x": X}])
    extractor.train(), reference.train()
    is_refused = refuses_or_agrees(extractor, reference, [{"x": X, "mask": MASK}])
    extractor.eval(), reference.eval()
    assert is_refused or not refuses_or_agrees(extractor, reference, [{"x": X}])


class InOneMode(nn.Module):
    """Cannot be traced in train mode, and leaves a text in eval mode where a mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), "plain"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if self.training:
            return x * float(x.detach().numpy().sum())
        if mask is not None:
            self.kept = "masked"
            return x * mask
        return x - 1 if x.dim() < 3 else x * len(self.kept)


def test_a_mode_that_cannot_be_traced_is_not_compared() -> None:
    torch.manual_seed(0)
    model = InOneMode().eval()
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs={"x": X}, adaptive=True)
    assert not refuses_or_agrees(extractor, reference, [{"x": X}, {"x": X, "mask": MASK}, {"x": X}])
    with pytest.raises(featx.TraceError, match="numpy"):
        extractor.train()(X, MASK)


class InAMode(nn.Module):
    """In one mode a call with a mask leaves what a call without one reads; in the other mode nothing is left."""

    def __init__(self, leaves_in_training: bool) -> None:
        super().__init__()
        self.linear, self.kept, self.leaves_in_training = nn.Linear(4, 4), "plain", leaves_in_training

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        is_so = self.training is self.leaves_in_training
        if mask is not None:
            if is_so:
                self.kept = "masked"
            return x * mask
        return x * len(self.kept) if is_so else x - 1


@pytest.mark.parametrize("leaves_in_training", [False, True])
def test_graphs_that_are_the_same_in_both_modes_are_compared_in_each(leaves_in_training: bool) -> None:
    torch.manual_seed(0)
    model = InAMode(leaves_in_training).train(not leaves_in_training)
    reference = copy.deepcopy(model)
    extractor = featx.create_feature_extractor(
        model, ["output"], example_inputs={"x": X}, adaptive=True, suppress_diff_warning=True
    )
    calls = [{"x": X}, {"x": X, "mask": MASK}, {"x": X}]
    assert not refuses_or_agrees(extractor, reference, calls)
    extractor.train(leaves_in_training), reference.train(leaves_in_training)
    assert refuses_or_agrees(extractor, reference, calls)


class WithOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, scale: float = 1.0, **options: Any
    ) -> dict[str, Tensor]:
        x = self.linear(self.embed(input_ids))
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        return {"x": x * scale, **({"more": x} if options.get("more") else {})}


@pytest.mark.parametrize("adaptive", [None, True])
@pytest.mark.parametrize("option", [{"scale": 2.0}, {"more": True}])
def test_options_of_a_call_are_not_those_of_later_calls(option: dict[str, Any], adaptive: bool | None) -> None:
    torch.manual_seed(0)
    model, ids, mask = WithOptions().eval(), torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 3)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs={"input_ids": ids}, adaptive=adaptive)
    for options in ({}, option, {}, option):
        for inputs in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}):
            found, expected = extractor(**inputs, **options)["output"], model(**inputs, **options)
            assert list(found) == list(expected)
            assert all(torch.equal(found[key], expected[key]) for key in expected)


class RemembersSource(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.memory: Tensor | None = None

    def forward(self, source: Tensor | None = None, target: Tensor | None = None) -> Tensor:
        if source is not None:
            self.memory = self.encoder(source)
        assert target is not None
        memory: Any = self.memory
        return self.decoder(target) + memory.mean(0)


def test_call_that_needs_what_an_earlier_one_has_left_says_so() -> None:
    example = {"source": X, "target": X}
    extractor = featx.create_feature_extractor(RemembersSource(), ["output"], example_inputs=example, adaptive=True)
    extractor(**example)
    with pytest.raises(featx.SpecializationError, match=r"'NoneType' .* stores what it computes in .* 'memory'"):
        extractor(target=X)
