"""Modules match by path, class or settings, and tensors that are read by class or form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer import matched_alike
from torch import nn

import featx
from featx.rewrite.targets import has_same_settings, longest_prefix


class ConvBN(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x))


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)))


def found(pattern: nn.Module, model: nn.Module, how: Any) -> list[str]:
    module = featx.symbolic_trace(model)
    matches = featx.SubgraphMatcher(pattern, match_modules=how).match(module.graph)
    return [str(match.returning_nodes[0]) for match in matches]


def test_modules_match_by_path_unless_asked_otherwise() -> None:
    assert len(matched_alike(ConvBN(), ConvBN())) == 1
    assert matched_alike(blocks(), ConvBN()) == []
    assert matched_alike(nn.Sequential(ConvBN()), ConvBN()) == []


def test_path_matches_whatever_the_class_as_in_torch_fx() -> None:
    other = ConvBN()
    other.bn = nn.InstanceNorm2d(4)
    assert len(matched_alike(other, ConvBN())) == 1


def test_modules_match_by_class_wherever_they_are() -> None:
    """https://github.com/pytorch/pytorch/issues/78201"""
    assert found(ConvBN(), blocks(), "type") == ["_1", "_2_1"]
    assert found(ConvBN(), nn.Sequential(ConvBN(), nn.ReLU()), "type") == ["_0_bn"]
    other = ConvBN()
    other.bn = nn.SyncBatchNorm(4)
    assert found(ConvBN(), other, "type") == []


def test_modules_match_by_class_and_settings() -> None:
    pattern = ConvBN()
    pattern.conv = nn.Conv2d(8, 4, 1)
    assert found(pattern, blocks(), "config") == ["_2_1"]
    assert found(ConvBN(), ConvBN(), "config") == ["bn"]


def test_module_that_the_pattern_calls_twice_is_one_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.relu(self.linear(x)))

    class Each(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.relu(self.other(x)))

    assert found(Twice(), nn.Sequential(Twice()), "type") == ["_0_linear_1"]
    assert found(Twice(), nn.Sequential(Each()), "type") == []
    assert found(Each(), nn.Sequential(Twice()), "type") == ["_0_linear_1"]


class Reads(nn.Module):
    def __init__(self, weight: Any, name: str = "weight") -> None:
        super().__init__()
        self.name = name
        setattr(self, name, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, getattr(self, self.name))


def test_parameters_match_by_class_whatever_their_name() -> None:
    parameter, tensor = nn.Parameter(torch.ones(2)), torch.ones(2)
    assert len(matched_alike(Reads(parameter, "scale"), Reads(nn.Parameter(torch.zeros(3))))) == 1
    assert found(Reads(tensor), Reads(parameter), "path") == []
    assert found(Reads(parameter), Reads(parameter), "config") == ["mul"]
    assert found(Reads(nn.Parameter(torch.ones(3))), Reads(parameter), "config") == []


def test_parameter_that_the_pattern_reads_below_a_module_lies_below_the_module_that_is_matched() -> None:
    class Tied(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) @ self.get_submodule(self.name).weight

    assert found(Tied("one"), nn.Sequential(Tied("one")), "type") == ["matmul"]
    assert found(Tied("one"), nn.Sequential(Tied("two")), "type") == []


def test_graph_without_its_module_is_refused_where_modules_are_compared() -> None:
    module = featx.symbolic_trace(ConvBN())
    orphan = copy.deepcopy(module.graph)
    orphan.owning_module = None
    with pytest.raises(featx.PatternError, match="pattern's graph does not know its module, so 'conv'"):
        featx.SubgraphMatcher(orphan, match_modules="type")
    with pytest.raises(featx.PatternError, match="searched graph does not know its module, so 'conv'"):
        featx.SubgraphMatcher(module, match_modules="type").match(orphan)
    assert len(featx.SubgraphMatcher(orphan).match(orphan)) == 1


def test_graph_without_its_module_still_matches_reads() -> None:
    module = featx.symbolic_trace(Reads(nn.Parameter(torch.ones(2))))
    orphan = copy.deepcopy(module.graph)
    orphan.owning_module = None
    assert len(featx.SubgraphMatcher(orphan).match(module.graph)) == 1
    assert len(featx.SubgraphMatcher(module).match(orphan)) == 1


SETTINGS: list[tuple[Callable[[], nn.Module], Callable[[], nn.Module], bool]] = [
    (lambda: nn.Conv2d(3, 4, 1), lambda: nn.Conv2d(3, 4, 1), True),
    (lambda: nn.Conv2d(3, 4, 1), lambda: nn.Conv2d(3, 4, 1, stride=2), False),
    (lambda: nn.Conv2d(3, 4, 1), lambda: nn.Conv2d(3, 4, 1, bias=False), False),
    (lambda: nn.Conv2d(3, 4, 1), lambda: nn.Conv2d(3, 4, 1).double(), False),
    (lambda: nn.Conv2d(3, 4, 1), lambda: nn.Conv2d(3, 4, 1).eval(), True),
    (lambda: nn.BatchNorm2d(4), lambda: nn.BatchNorm2d(4, eps=1e-3), False),
    (lambda: nn.BatchNorm2d(4), lambda: nn.BatchNorm2d(4, track_running_stats=False), False),
    (lambda: nn.ReLU(), lambda: nn.ReLU(inplace=True), False),
    (lambda: nn.GELU(), lambda: nn.GELU("tanh"), False),
    (lambda: nn.LSTM(2, 3), lambda: nn.LSTM(2, 3), True),
    (lambda: nn.LSTM(2, 3), lambda: nn.LSTM(2, 3, batch_first=True), False),
    (lambda: nn.MultiheadAttention(4, 2), lambda: nn.MultiheadAttention(4, 2), True),
    (lambda: nn.MultiheadAttention(4, 2), lambda: nn.MultiheadAttention(4, 4), False),
    (lambda: nn.TransformerEncoderLayer(4, 2), lambda: nn.TransformerEncoderLayer(4, 2), True),
    (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.ReLU(True)), False),
    (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), False),
    (lambda: nn.Linear(2, 2), lambda: nn.Bilinear(2, 2, 2), False),
]


@pytest.mark.parametrize(("one", "other", "same"), SETTINGS)
def test_settings_are_all_but_values_and_modes(
    one: Callable[[], nn.Module], other: Callable[[], nn.Module], same: bool
) -> None:
    assert has_same_settings(one(), other()) is has_same_settings(other(), one()) is same


def test_private_attribute_of_a_module_is_a_setting() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self._scale = scale

    assert has_same_settings(Scaled(2.0), Scaled(2.0))
    assert not has_same_settings(Scaled(2.0), Scaled(3.0))


def test_longest_prefix_ends_at_a_dot() -> None:
    assert longest_prefix("a.b.c", {"a": 1, "a.b": 1, "a.b.c": 1}) == "a.b"
    assert longest_prefix("ab.c", {"a": 1}) is None
