"""What forward does around a module that is kept whole, and what such a module could find of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import featx


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.fc(x)) * getattr(self.fc.weight, "temperature", 1.0)
        mask = getattr(x, "mask", None)
        return y if mask is None else y.masked_fill(mask, 0.0)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.child = Child()
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.around(self.first(x)))

    def around(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


class TensorAttribute(Around):
    def around(self, x: torch.Tensor) -> torch.Tensor:
        x.mask = x > 0  # type: ignore[attr-defined]
        return self.child(x)


class Device(Around):
    def around(self, x: torch.Tensor) -> torch.Tensor:
        with torch.device(x.device):
            return self.child(x)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is functional.relu else result


class FunctionMode(Around):
    def around(self, x: torch.Tensor) -> torch.Tensor:
        with Doubling():
            return self.child(x)


class DoublingKernels(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.relu.default else result


class DispatchMode(Around):
    def around(self, x: torch.Tensor) -> torch.Tensor:
        with DoublingKernels():
            return self.child(x)


class DispatchModeAroundACall(Around):
    def around(self, x: torch.Tensor) -> torch.Tensor:
        with DoublingKernels():
            return torch.relu(x)


class HookOfAllModules(Around):
    def around(self, x: torch.Tensor) -> torch.Tensor:
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, result: result * 2 if isinstance(module, Child) else None
        )
        try:
            return self.child(x)
        finally:
            handle.remove()


class Seed(Around):
    def around(self, x: torch.Tensor) -> torch.Tensor:
        _seed(3)
        return self.child(x) + torch.randn_like(x)


def _seed(number: int) -> None:
    getattr(torch, "manual_" + "seed")(number)


class ParameterAttribute(Around):
    def around(self, x: torch.Tensor) -> torch.Tensor:
        self.child.fc.weight.temperature = x.mean()  # type: ignore[attr-defined]
        return self.child(x)


X = torch.rand(2, 6)


@pytest.mark.parametrize("kind", [TensorAttribute, Device])
@pytest.mark.parametrize("names", [["last"], ["child"], ["child.fc", "last"]])
def test_module_that_may_read_it_is_looked_into(kind: type[Around], names: list[str]) -> None:
    model = kind().eval()
    extractor = featx.create_feature_extractor(model, names, example_inputs=X)
    x, seen = torch.randn(3, 6), {}
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *call, name=name: seen.update({name: call[2].clone()}))
    model(x)
    assert all(torch.equal(value, seen[name]) for name, value in extractor(x).items())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FunctionMode, "TorchFunctionMode"),
        (DispatchMode, "TorchDispatchMode"),
        (DispatchModeAroundACall, "TorchDispatchMode"),
        (HookOfAllModules, "hooks of all modules"),
        (Seed, "seeds"),
        (ParameterAttribute, "'temperature' of 'child.fc.weight'"),
    ],
)
@pytest.mark.parametrize("example", [X, None])
def test_what_no_graph_repeats_is_refused(kind: type[Around], reason: str, example: torch.Tensor | None) -> None:
    model = kind().eval()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    with pytest.raises(featx.TraceError, match=reason):
        featx.create_feature_extractor(model, ["last"], example_inputs=example)
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(model.child.fc.weight) == {}
    assert not nn.modules.module._global_forward_hooks


class Chunks(nn.Module):
    def __init__(self, split: Any) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.split = split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        self.split(h)[0].mul_(-2)
        return self.last(h)


@pytest.mark.parametrize(
    "split",
    [
        lambda h: torch.unsafe_chunk(h, 2, 1),
        lambda h: torch.unsafe_split(h, 3, 1),
        lambda h: h.unsafe_split_with_sizes([3, 3], 1),
    ],
)
def test_parts_that_share_memory_and_no_version_are_written(split: Any) -> None:
    model = Chunks(split).eval()
    got = featx.create_feature_extractor(model, ["first", "last"], example_inputs=X)(X)
    assert torch.equal(got["first"], model.first(X))
    assert torch.equal(got["last"], model(X))


class Propagates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency.coalesce(), self.fc(x))


def test_sparse_input_may_be_coalesced_or_not() -> None:
    model = Propagates().eval()
    adjacency = torch.sparse_coo_tensor([[0, 1, 1], [1, 0, 0]], [1.0, 2.0, 3.0], (2, 2), check_invariants=True)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=(X, adjacency.coalesce()))
    for each in (adjacency, adjacency.coalesce()):
        assert torch.equal(extractor(X, each)["output"], model(X, each))
