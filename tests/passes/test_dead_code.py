from __future__ import annotations

import torch
from torch import nn

from featx import symbolic_trace
from featx.passes import eliminate_dead_code


def test_what_nobody_reads_goes_and_writes_that_are_seen_stay() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.relu(y)
        y.add_(1)
        return y * 3

    gm = symbolic_trace(forward)
    assert eliminate_dead_code(gm)
    assert [node.name for node in gm.graph.nodes] == ["x", "mul", "add_", "mul_1", "output"]
    assert torch.equal(gm(torch.ones(2)), torch.full((2,), 9.0))
    assert not eliminate_dead_code(gm)


def test_own_rule_says_what_stays() -> None:
    gm = symbolic_trace(lambda x: (torch.relu(x), torch.neg(x), x + 1)[2])
    assert eliminate_dead_code(gm, lambda node: node.name == "neg")
    assert [node.name for node in gm.graph.nodes] == ["x", "neg", "add", "output"]


def test_modules_are_judged_in_their_present_mode() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm(x)
            return x + 1

    assert not eliminate_dead_code(symbolic_trace(Model().train()))
    assert eliminate_dead_code(symbolic_trace(Model().eval()))
