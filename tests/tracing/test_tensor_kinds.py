"""Tensors of a class of their own, or with attributes of their own, as inputs and as buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import featx


class Image(torch.Tensor):
    def brightness(self) -> float:
        return 2.0


def is_image(x: Any) -> bool:
    return isinstance(x, Image)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.rand(4).as_subclass(Image))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class AsksForClass(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if is_image(x) else x)


class AsksForAttribute(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if hasattr(x, "lens") else x)


class ReadsAttribute(Net):
    def forward(self, x: Any) -> torch.Tensor:
        return self.layer(x * x.lens)


class CallsMethod(Net):
    def forward(self, x: Any) -> torch.Tensor:
        return self.layer(x * x.brightness())


class AsksForType(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x if type(x) is torch.Tensor else x * 2)


class AsksForParameter(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if isinstance(x, nn.Parameter) else x)


class AsksForAny(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if x.__dict__ else x)


class UsesBuffer(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x) + self.mean
        return x * 2 if isinstance(x, Image) else x


def image() -> torch.Tensor:
    return torch.rand(2, 4).as_subclass(Image)


def with_attribute() -> torch.Tensor:
    x: Any = torch.rand(2, 4)
    x.lens = 3.0
    return x


@pytest.mark.parametrize(
    ("kind", "x"),
    [
        (AsksForClass, image()), (CallsMethod, image()), (AsksForAttribute, with_attribute()),
        (ReadsAttribute, with_attribute()), (UsesBuffer, torch.rand(2, 4)), (AsksForType, image()),
        (AsksForType, nn.Parameter(torch.rand(2, 4))), (AsksForParameter, nn.Parameter(torch.rand(2, 4))),
        (AsksForAny, with_attribute()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["1.layer", "output"])
def test_what_no_plain_tensor_has_is_refused_where_code_names_it(kind: type[Net], x: torch.Tensor, name: str) -> None:
    model = nn.Sequential(nn.Identity(), kind()).eval()
    for root, path in ((model, name), (model[1], name.removeprefix("1."))):
        if path == "output" and root is model and kind not in (CallsMethod, ReadsAttribute):
            extractor = featx.create_feature_extractor(root, [path], example_inputs=x)  # it is kept whole
            assert torch.equal(extractor(x)["output"], root(x))
            continue
        with pytest.raises(featx.TraceError, match=r"plain tensor.*as_subclass"):
            featx.create_feature_extractor(root, [path], example_inputs=x)


@pytest.mark.parametrize("x", [image(), with_attribute(), nn.Parameter(torch.rand(2, 4))])
def test_others_run_on_such_tensors(x: torch.Tensor) -> None:
    model = Net().eval()
    got = featx.create_feature_extractor(model, ["layer"], example_inputs=x)(x)["layer"]
    assert torch.equal(got, model(x))


class ForwardOfInstance(Net):
    """The forward that runs is an attribute of the module: that of its class says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * 2 if hasattr(x, "lens") else x)


@pytest.mark.parametrize("is_root", [True, False])
def test_forward_of_the_instance_is_the_one_that_is_asked(is_root: bool) -> None:
    model = ForwardOfInstance() if is_root else nn.Sequential(nn.Identity(), ForwardOfInstance())
    with pytest.raises(featx.TraceError, match=r"plain tensor.*names 'lens'"):
        featx.create_feature_extractor(model, ["layer" if is_root else "1.layer"], example_inputs=with_attribute())


def double_parameters(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if isinstance(x, nn.Parameter) else x * 3


REGISTER = {"double": double_parameters}


class Registered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return REGISTER["double"](x)


def test_code_in_a_register_asks_for_a_class() -> None:
    with pytest.raises(featx.TraceError, match="double_parameters names 'Parameter'"):
        featx.trace(Registered(), nn.Parameter(torch.ones(2)))


class NamesTypeOfTensor(nn.Module):
    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return i + 1 if isinstance(i, torch.LongTensor) else i.long() - 1


def test_types_of_tensors_are_dtypes() -> None:
    model, i = NamesTypeOfTensor(), torch.ones(3).long()
    graph = featx.trace(model, i)
    assert torch.equal(graph(i * 4), model(i * 4))
    with pytest.raises(featx.SpecializationError, match="dtype of input 'i'"):
        graph(i.int())


class LeavesNone(nn.Module):
    """As fastai's `SequentialEx`, which a call before has left on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> torch.Tensor:
        x.first = x
        y = self.layer(x) + x.first
        x.first = None
        return y


class ReadsMask(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return x * 2 if x.mask is None else x * 3


class AsksForMask(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return x * 2 if hasattr(x, "mask") else x * 3


class LooksIntoDict(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return x * (2 + len(x.__dict__))


class CatchesMissing(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        try:
            return x * 2 if x.mask is None else x * 3
        except AttributeError:
            return x * 4


def test_attributes_that_are_none() -> None:
    model, x = LeavesNone().eval(), torch.rand(2, 4)
    model(x)
    extractor = featx.create_feature_extractor(model, ["layer", "output"], example_inputs=x)
    assert torch.equal(extractor(x)["output"], model(x))
    x = torch.rand(2)
    x.mask = None  # pyright: ignore[reportAttributeAccessIssue]
    for asks in (ReadsMask(), AsksForMask(), CatchesMissing(), LooksIntoDict()):
        with pytest.raises(featx.TraceError, match="an input has the attribute 'mask'"):
            featx.trace(asks, x)
