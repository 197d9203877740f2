"""What the tests of features share: the values that forward hooks see in an untouched model, and its state."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

Captured = dict[str, list[Any]]


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(_clone(item) for item in value) if isinstance(value, (tuple, list)) else value


def _capture(model: nn.Module, paths: Iterable[str], *inputs: torch.Tensor, seed: int = 0) -> Captured:
    found: Captured = defaultdict(list)
    twin = copy.deepcopy(model)
    for path in paths:
        module = twin.get_submodule(path)
        module.register_forward_hook(lambda _, args, output, path=path: found[path].append(_clone(output)))
        module.register_forward_pre_hook(
            lambda _, args, path=path: found[f"{path} input"].append(_clone(args[0])), prepend=True
        )
    torch.manual_seed(seed)
    result = twin(*[x.clone() for x in inputs])
    found["result"].append(_clone(result))
    return found


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run small models in one thread: several only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def capture() -> Callable[..., Captured]:
    """The yardstick: `capture(model, paths, *inputs, seed=0)` runs a copy of `model` with hooks on `paths`.

    For each path it returns what each call gave, in order, and under `"<path> input"` what each call got.
    """
    return _capture


@pytest.fixture
def unchanged() -> Callable[[nn.Module], Callable[[], None]]:
    """A function that notes the state of a model and returns one that fails where it differs by then."""

    def note(model: nn.Module) -> Callable[[], None]:
        before = _state(model)
        values = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
        generators = torch.get_rng_state(), random.getstate()

        def check() -> None:
            after = _state(model)
            for key in before.keys() | after.keys():
                assert after.get(key) == before.get(key), key
            assert all(map(torch.equal, values, (*model.parameters(), *model.buffers())))
            assert torch.equal(generators[0], torch.get_rng_state())
            assert generators[1] == random.getstate()

        return check

    return note


def _state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            found[f"{path}.{name}"] = value if isinstance(value, bool) else type(value)
            if isinstance(value, dict):
                found[f"{path}.{name} items"] = [(key, id(item)) for key, item in value.items()]
    return found
