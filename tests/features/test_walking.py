"""The parts of an extractor are walked as those of the model: by number, by key, in loops."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.heads = nn.ModuleDict({"a": Block(), "b": Block()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        for number in (0, 2, 3):
            x = self.layers[number](x)
        return self.heads["a"](x) + self.heads["b"](x)


@pytest.fixture
def model() -> nn.Module:
    return Model().eval()


def extractor_of(model: nn.Module, *names: str) -> featx.DualGraphModule:
    return featx.create_feature_extractor(model, list(names), example_inputs=X)


def test_blocks_have_their_numbers(model: nn.Module) -> None:
    extractor = extractor_of(model, "blocks.1", "blocks.3")
    assert len(extractor.blocks) == 4
    assert list(extractor.blocks) == list(model.blocks[:4])
    assert all(extractor.blocks[number] is model.blocks[number] for number in range(4))
    assert extractor.blocks[-1] is model.blocks[3]
    assert list(extractor.blocks[1:3]) == [model.blocks[1], model.blocks[2]]
    assert [name for name, _ in extractor.blocks.named_children()] == ["0", "1", "2", "3"]
    with pytest.raises(IndexError, match="the modules 0, 1, 2, 3 of a list, and not 4"):
        extractor.blocks[4]


@pytest.mark.slow
def test_there_may_be_gaps(model: nn.Module) -> None:
    extractor = extractor_of(model, "layers.3")
    assert len(extractor.layers) == 3
    assert extractor.layers[2] is model.layers[2]
    assert extractor.layers[-2] is model.layers[2]
    assert extractor.layers[1:4] == [model.layers[2], model.layers[3]]
    with pytest.raises(IndexError):
        extractor.layers[1]
    with pytest.raises(IndexError):
        extractor.layers[-4]


def test_dicts_have_their_keys(model: nn.Module) -> None:
    extractor = extractor_of(model, "heads.a")
    assert isinstance(extractor.heads, nn.ModuleDict)
    assert list(extractor.heads) == ["a"]
    assert extractor.heads["a"] is model.heads["a"]


def test_freezing_by_depth_and_rates_by_layer(model: nn.Module) -> None:
    extractor = extractor_of(model, "blocks.3")
    for block in extractor.blocks[:2]:
        block.requires_grad_(False)
    groups = [
        {"params": block.parameters(), "lr": 0.1 * 0.5**depth} for depth, block in enumerate(reversed(extractor.blocks))
    ]
    assert len(torch.optim.SGD(groups).param_groups) == 4
    extractor(X)["blocks.3"].sum().backward()
    assert [block.linear.weight.grad is None for block in model.blocks[:4]] == [True, True, False, False]


def test_copies_keep_it_and_its_state_dict_is_the_models(model: nn.Module) -> None:
    extractor = extractor_of(model, "layers.3", "heads.b")
    for each in (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        assert [name for name, _ in each.layers.named_children()] == ["0", "2", "3"]
        assert torch.equal(each(X)["layers.3"], extractor(X)["layers.3"])
    assert set(extractor.state_dict()) < set(model.state_dict())
    extractor.load_state_dict(model.state_dict(), strict=False)


def test_an_opened_module_of_another_class_stays_a_module(model: nn.Module) -> None:
    extractor = extractor_of(model, "blocks.3.linear")
    assert type(extractor.blocks[3]) is nn.Module
    assert extractor.blocks[3].linear is model.blocks[3].linear


def test_a_sequential_with_names_stays_a_module() -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    inner = nn.Sequential()
    inner.add_module("a", nn.Linear(4, 4))
    inner.add_module("b", nn.ReLU())
    model.add_module("body", inner)
    extractor = extractor_of(model.eval(), "body.a")
    assert extractor.body.a is model.body.a


@pytest.mark.slow
def test_compilers_take_it(model: nn.Module) -> None:
    extractor = extractor_of(model, "layers.3", "heads.b")
    compiled = torch.compile(extractor, backend="eager", fullgraph=True)
    exported = torch.export.export(extractor, (X,)).module()
    for each in (compiled, exported):
        assert torch.equal(each(X)["heads.b"], extractor(X)["heads.b"])


class Named(nn.Module):
    """Has a Sequential whose modules have names, as torchvision's RegNet and DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(OrderedDict((f"block{number}", Block()) for number in range(1, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trunk(x)


def test_sequential_with_names_is_walked_by_number_too() -> None:
    model = Named().eval()
    trunk = extractor_of(model, "trunk.block2", "trunk.block3").trunk
    assert len(trunk) == 3
    assert list(trunk) == [model.trunk.block1, model.trunk.block2, model.trunk.block3]
    assert trunk[0] is trunk.block1 is model.trunk[0]
    assert trunk[1:] == [model.trunk[1], model.trunk[2]]
    for copied in (copy.deepcopy(trunk), pickle.loads(pickle.dumps(trunk))):
        assert copied[2] is copied.block3
    with pytest.raises(IndexError, match="block1, block2, block3, and not 'block4'"):
        trunk[3]


class Scaled(nn.Module):
    """Has parameters in a list and in a dict, of which forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((4,), float(number)) for number in range(4))
        self.shifts = nn.ParameterDict({"a": torch.ones(4), "b": torch.zeros(4), "c": torch.full((4,), 2.0)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[2] * self.scales[1] + self.shifts["c"] + self.shifts["a"]


def test_lists_and_dicts_of_parameters_are_walked_as_those_of_the_model() -> None:
    model = Scaled().eval()
    extractor = extractor_of(model, "output")
    scales, shifts = extractor.scales, extractor.shifts
    assert isinstance(scales, nn.ParameterList)
    assert isinstance(shifts, nn.ParameterDict)
    assert [id(each) for each in scales] == [id(model.scales[1]), id(model.scales[2])]
    assert scales[2] is scales[-1] is model.scales[2]
    assert len(scales) == len(scales[1:]) == len(shifts) == 2
    with pytest.raises(IndexError, match="the parameters 1, 2, and not 0"):
        scales[0]
    assert {key: id(value) for key, value in shifts.items()} == {key: id(model.shifts[key]) for key in ("a", "c")}
    assert "b" not in shifts
    assert "(2): (4,)" in repr(scales)
    assert "(c): (4,)" in repr(shifts)
    for copied in (copy.deepcopy(extractor), pickle.loads(pickle.dumps(extractor))):
        assert [value.tolist() for value in copied.scales] == [[1.0] * 4, [2.0] * 4]
        assert sorted(copied.shifts) == ["a", "c"]
        assert torch.equal(copied(X)["output"], model(X))


@pytest.mark.slow
def test_compilers_take_lists_and_dicts_of_parameters() -> None:
    model = Scaled().eval()
    extractor = extractor_of(model, "output")
    scripted = torch.jit.script(extractor)
    compiled = torch.compile(extractor, backend="eager", fullgraph=True)
    for each in (scripted, compiled, torch.export.export(extractor, (X,)).module()):
        assert torch.equal(each(X)["output"], model(X))


@pytest.mark.parametrize("model", [Model(), Named()])
def test_who_calls_a_container_that_is_opened_learns_what_to_do(model: nn.Module) -> None:
    name = "blocks" if isinstance(model, Model) else "trunk"
    part = next(iter(model.get_submodule(name)._modules))
    extractor = extractor_of(model.eval(), f"{name}.{part}")
    with pytest.raises(featx.RequestError, match=f"of this container \\({part}\\) one by one.*call that of the model"):
        getattr(extractor, name)(X)
