"""opened_for: the modules around what is asked for, and no others."""

from __future__ import annotations

import pytest
from torch import nn

from featx.features.requests.opening import modules_to_open


def model() -> nn.Module:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return nn.ModuleDict({"stem": nn.Linear(2, 2), "layer": nn.Sequential(block, nn.ReLU()), "head": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], {""}),
        (["stem"], {""}),
        (["layer"], {""}),
        (["layer.0"], {"", "layer"}),
        (["layer.0.1"], {"", "layer", "layer.0"}),
        (["add"], {""}),
        (["stem.add"], {"", "stem"}),
        (["layer.0.add_1"], {"", "layer", "layer.0"}),
        (["layer.0.gone.add"], {"", "layer", "layer.0"}),
        (["stem", "layer.1"], {"", "layer"}),
        (["stem_1", "layer.0_1"], {"", "layer"}),
    ],
)
def test_modules_around_a_value_are_opened(names: list[str], expected: set[str]) -> None:
    assert modules_to_open(dict(model().named_modules()), names) == expected


def test_module_without_children_opens_only_itself() -> None:
    assert modules_to_open({""}, ["add"]) == {""}
