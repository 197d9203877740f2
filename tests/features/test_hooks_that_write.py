"""Forward hooks of modules that are kept whole write the module's input or output in place; against the eager model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx


def double(module: nn.Module, args: Any) -> None:
    args[0].mul_(2)


def add(number: int, module: nn.Module, args: Any) -> None:
    args[0].add_(number)


class Doubles:
    def __call__(self, module: nn.Module, args: Any) -> None:
        args[0].mul_(2)

    def behind(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.mul_(2)


HOOKS: dict[str, Callable[[nn.Sequential], Any]] = {
    "ahead": lambda block: block.register_forward_pre_hook(double),
    "ahead, by a lambda that returns it": lambda block: block.register_forward_pre_hook(lambda m, a: (a[0].mul_(2),)),
    "of a module inside": lambda block: block[0].register_forward_pre_hook(double),
    "a partial function": lambda block: block.register_forward_pre_hook(functools.partial(add, 3)),
    "an object": lambda block: block.register_forward_pre_hook(Doubles()),
    "after, its input": lambda block: block.register_forward_hook(lambda m, args, output: double(m, args)),
    "after, its output": lambda block: block.register_forward_hook(Doubles().behind),
}


@pytest.mark.parametrize("names", [["0", "output"], ["0", "1", "2"], ["1.0", "output"]], ids=" ".join)
@pytest.mark.parametrize("kind", HOOKS)
def test_features_are_what_the_modules_returned(kind: str, names: list[str]) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), block, nn.Linear(4, 4)).eval()
    HOOKS[kind](block)
    x = torch.rand(3, 4)
    with torch.no_grad():
        extractor = featx.create_feature_extractor(model, names, example_inputs=torch.rand(2, 4))
        found = extractor(x)
        seen: dict[str, torch.Tensor] = {}
        for path in ("0", "1", "1.0", "2"):  # after the hooks that write
            module = model.get_submodule(path)
            module.register_forward_hook(lambda m, args, output, path=path: seen.update({path: output.clone()}))
        seen["output"] = model(x)
    assert all(torch.equal(found[name], seen[name]) for name in names)
