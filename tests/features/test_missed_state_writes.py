"""Writes to the model's state, after the requested value, under conditions that did not hold for the example.

What a later call computes is compared with a hook on a copy of the model that has made the same calls.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import nn

import featx


class Scaled(nn.Module):
    """The requested value, `act`, reads `scale`; subclasses write that after it, for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.act, self.head = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(()))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.act(self.proj(x) * self.scale))
        self.adapt(y, x)
        return y

    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        raise NotImplementedError


class ByValue(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if y.abs().max() > 50:
            self.scale.mul_(0.5)


class BySize(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            self.scale *= 0.5


class ByItem(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            self.scale[...] = self.scale + 1


class ByAlias(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        state = {"scale": self.scale}
        for each in [state["scale"].view(1)]:
            if x.shape[0] == 3:
                each.mul_(0.5)


class ByOut(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            torch.mul(self.scale, 0.5, out=self.scale)


class ByMethod(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        self.halve(self.scale, x.shape[0])

    def halve(self, buffer: torch.Tensor, count: int) -> None:
        if count == 3:
            buffer.mul_(0.5)


def halve(buffer: torch.Tensor, is_due: bool) -> None:
    if is_due:
        buffer.mul_(0.5)


class ByFunction(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        halve(self.scale, x.shape[0] == 3)


class Halving(nn.Module):
    def forward(self, buffer: torch.Tensor, y: torch.Tensor) -> None:
        if y.abs().max() > 50:
            buffer.mul_(0.5)


class BySubmodule(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.halving = Halving()

    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        self.halving(self.scale, y)


class ByInit(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            nn.init.constant_(self.scale, 3.0)


class ByForeach(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            torch._foreach_mul_([self.scale], 0.5)


class ByMethodOfTensor(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            torch.Tensor.mul_(self.scale, 0.5)


class ByViewOfAFunction(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            torch.reshape(self.scale, (1,)).mul_(0.5)


class ByOtherView(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            self.scale.broadcast_to(()).mul_(0.5)


HELPERS = types.ModuleType("helpers")
HELPERS.halve = halve  # type: ignore[attr-defined]


class ByFunctionOfAModule(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        HELPERS.halve(self.scale, x.shape[0] == 3)


class ByProperty(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            _ = self.written

    @property
    def written(self) -> torch.Tensor:
        return self.scale.mul_(0.5)


class ByImportOfItsOwn(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        from torch.nn import init

        if x.shape[0] == 3:
            init.constant_(self.scale, 3.0)


class ByGetattr(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        name = "scale"
        if x.shape[0] == 3:
            getattr(self, name).mul_(0.5)


class BySetattr(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            setattr(self, "scale", self.scale + 1)  # noqa: B010 - as people write it


class OfWeights(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if y.abs().max() > 50:
            with torch.no_grad():
                self.proj.weight.clamp_(-0.1, 0.1)


class OfAllWeights(Scaled):
    @torch.no_grad()
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if x.shape[0] == 3:
            for parameter in self.parameters():
                parameter.mul_(0.5)


class EachThirdCall(Scaled):
    """Computes what it writes from a mean that no graph needs which does not write it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("step", torch.tensor(0))
        self.mean: torch.Tensor
        self.step: torch.Tensor

    @torch.no_grad()
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        self.mean.mul_(0.9).add_(y.mean(), alpha=0.1)
        self.step += 1
        if self.step % 3 == 0:
            self.scale.copy_(self.mean)


KINDS = [ByValue, BySize, ByItem, ByAlias, ByOut, ByMethod, ByFunction, BySubmodule, ByInit, ByForeach,
         ByMethodOfTensor, ByViewOfAFunction, ByOtherView, ByFunctionOfAModule, ByProperty, ByImportOfItsOwn,
         ByGetattr, OfWeights, OfAllWeights,
         EachThirdCall]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [None, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_call_misses_a_write_of_an_earlier_one(kind: type[Scaled], adaptive: bool | None) -> None:
    torch.manual_seed(0)
    model = kind().train()
    hooked, seen = copy.deepcopy(model), list[torch.Tensor]()
    hooked.act.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    extractor = featx.create_feature_extractor(model, ["act"], example_inputs=torch.rand(4, 6), adaptive=adaptive)
    for call in range(6):
        x = torch.rand(3 if call == 2 else 4, 6) * (1000 if call == 2 else 1)
        hooked(x)
        try:
            found: Any = extractor(x)["act"]
        except featx.SpecializationError:
            assert adaptive is None
            break
        assert torch.equal(found, seen[-1])
    else:
        assert not torch.equal(next(model.parameters()), kind().proj.weight)  # another draw: all six calls were made


def test_a_buffer_that_is_replaced_by_its_name_is_refused() -> None:
    extractor = featx.create_feature_extractor(BySetattr().train(), ["act"], example_inputs=torch.rand(4, 6))
    extractor(torch.rand(5, 6))
    with pytest.raises(featx.SpecializationError, match=r"x\.shape\[0\] == 3"):
        extractor(torch.rand(3, 6))


class InTraining(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if self.training and x.shape[0] == 3:
            self.scale.mul_(0.5)


class OfOtherState(Scaled):
    def adapt(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if y.shape[1] == 7:
            self.head.weight.detach().mul_(0.5)


@pytest.mark.parametrize("kind", [InTraining, OfOtherState])
def test_decisions_about_what_is_not_read_or_not_written_in_this_mode_are_pruned(kind: type[Scaled]) -> None:
    extractor = featx.create_feature_extractor(
        kind().eval(), ["act"], example_inputs=torch.rand(4, 6), suppress_diff_warning=True
    )
    assert not hasattr(extractor, "head")
