"""Stores that forward hooks fill, and that forward asks in a way that raises nothing where they are empty."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx

IMAGES = torch.rand(2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def stored(self, x: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return sum(self.stored(x), y), len(self.stored(x))


class Store:
    """As FeatureHooks of timm: what it has by device, or nothing."""

    def __init__(self, layers: nn.Sequential) -> None:
        self.outputs: dict[Any, OrderedDict[int, Tensor]] = defaultdict(OrderedDict)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(partial(self.put, index))

    def put(self, index: int, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs[output.device][index] = output

    def get(self, device: torch.device) -> list[Tensor]:
        return list(self.outputs[device].values())


class InObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store(self.body)

    def stored(self, x: Tensor) -> list[Tensor]:
        return self.store.get(x.device)


class Holder:
    def __init__(self, inner: Store) -> None:
        self.inner = inner


class InObjectInObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder(Store(self.body))

    def stored(self, x: Tensor) -> list[Tensor]:
        return self.holder.inner.get(x.device)


class UnderAnotherName(Net):
    def __init__(self) -> None:
        super().__init__()
        kept: list[Tensor] = []
        self.features = kept
        self.body[0].register_forward_pre_hook(lambda module, args: kept.clear())
        self.body[1].register_forward_hook(lambda module, args, output: kept.append(output))

    def stored(self, x: Tensor) -> list[Tensor]:
        return list(self.features)


class OfPartial(Net):
    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.body[1].register_forward_hook(partial(put_under, self.features))

    def stored(self, x: Tensor) -> list[Tensor]:
        return list(self.features.values())


def put_under(where: dict[str, Tensor], module: nn.Module, args: Any, output: Tensor) -> None:
    where["relu"] = output


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def record(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.last = output

    def get(self) -> list[Tensor]:
        return [] if self.last is None else [self.last]


class InModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.body[1].register_forward_hook(self.recorder.record)

    def stored(self, x: Tensor) -> list[Tensor]:
        return self.recorder.get()


FOUND: dict[str, Tensor] = {}


def found() -> list[Tensor]:
    return list(FOUND.values())


class InGlobal(Net):
    def __init__(self) -> None:
        super().__init__()
        self.body[1].register_forward_hook(put_into_global)

    def stored(self, x: Tensor) -> list[Tensor]:
        return found()


def put_into_global(module: nn.Module, args: Any, output: Tensor) -> None:
    FOUND["relu"] = output


MODELS = [InObject, InObjectInObject, UnderAnotherName, OfPartial, InModule, InGlobal]


@pytest.mark.parametrize("has_run", [False, True], ids=["new", "has run"])
@pytest.mark.parametrize("make", MODELS)
def test_what_a_hook_has_stored_is_found(make: Callable[[], Net], has_run: bool) -> None:
    FOUND.clear()
    model = make().eval()
    if has_run:
        model(IMAGES)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=IMAGES)
    x = torch.rand(3, 4)
    got, count = extractor(x)["output"]
    FOUND.clear()
    expected, expected_count = model(x)
    assert torch.equal(got, expected)
    assert count == expected_count > 0


@pytest.mark.parametrize("make", MODELS)
def test_a_trace_has_what_a_hook_has_stored(make: Callable[[], Net]) -> None:
    FOUND.clear()
    model = make().eval()
    graph_module = featx.trace(model, IMAGES)
    got, count = graph_module(IMAGES)
    expected, expected_count = model(IMAGES)
    assert torch.equal(got, expected)
    assert count == expected_count > 0
