"""Memory that is shared or written otherwise than before keeps a match from being replaced where that would be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peer import count_replaced, ones, relu
from torch import nn
from torch.nn import functional

import featx
from featx.rewrite import AnyOf

Function = Callable[..., Any]


# -- memory that is shared ---------------------------------------------------------------------------------------------


def test_result_that_would_become_its_input_is_not_replaced_where_it_is_written() -> None:
    def written(x: Any) -> Any:
        doubled = x * 2.0
        result = doubled * 1
        result.add_(1)
        return doubled + result

    def input_written(x: Any) -> Any:
        doubled = x * 2.0
        result = doubled * 1
        doubled.add_(1)
        return result

    def dead_input(x: Any) -> Any:
        result = (x * 2.0) * 1
        return result.add_(1)

    def of_the_caller(x: Any) -> Any:
        return (x * 1).add_(1)

    counts = [
        count_replaced(model, lambda x: x * 1, lambda x: x)
        for model in (written, input_written, dead_input, of_the_caller)
    ]
    assert counts == [0, 0, 1, 0]
    module, (x,) = featx.symbolic_trace(of_the_caller), ones()
    featx.replace_pattern(module, lambda x: x * 1, lambda x: x)
    module(x)
    assert torch.equal(x, ones()[0])


def test_view_that_would_become_a_copy_is_not_replaced_where_it_is_written() -> None:
    def written(x: Any) -> Any:
        doubled = x * 2
        doubled.view(2, 2).add_(1)
        return doubled

    def read(x: Any) -> Any:
        doubled = x * 2
        return doubled.view(2, 2) + doubled.sum()

    counts = [
        count_replaced(model, lambda x: x.view(2, 2), lambda x: x.view(2, 2).clone()) for model in (written, read)
    ]
    assert counts == [0, 1]


def test_outputs_that_would_become_one_are_not_replaced_where_one_is_written() -> None:
    def written(x: Any) -> Any:
        first, second = torch.relu(x), torch.clamp_min(x, 0)
        first.add_(1)
        return first + second

    def read(x: Any) -> Any:
        return torch.relu(x) * 2 + torch.clamp_min(x, 0)

    def replacement(x: Any) -> Any:
        first = torch.relu(x)
        return first, first

    counts = [
        count_replaced(model, lambda x: (torch.relu(x), torch.clamp_min(x, 0)), replacement)
        for model in (written, read)
    ]
    assert counts == [0, 1]


def test_inputs_that_share_memory_which_is_written_rule_a_match_out() -> None:
    def overlapping(x: Any) -> Any:
        doubled = x * 2.0
        return torch.add(doubled.view(4), doubled.add_(1))

    def apart(x: Any) -> Any:
        return torch.add(x * 3.0, (x * 2.0).add_(1))

    def pattern(x: Any, y: Any) -> Any:
        return torch.add(x, y.add_(1))

    def replacement(x: Any, y: Any) -> Any:
        before = x.clone()
        return torch.add(before, y.add_(1))

    assert [count_replaced(model, pattern, replacement) for model in (overlapping, apart)] == [0, 1]


# -- writes that come or go --------------------------------------------------------------------------------------------


def doubled_in_place(x: Any) -> Any:
    return x.mul_(2).clone()


def test_replacement_that_writes_is_made_only_where_nobody_reads_what_it_writes() -> None:
    def read_later(x: Any) -> Any:
        fresh = x + 1
        return torch.mul(fresh, 2) + fresh

    def of_the_caller(x: Any) -> Any:
        return torch.mul(x, 2)

    def dead(x: Any) -> Any:
        return torch.mul(x + 1, 2)

    counts = [
        count_replaced(model, lambda x: torch.mul(x, 2), doubled_in_place)
        for model in (read_later, of_the_caller, dead)
    ]
    assert counts == [0, 0, 1]


def test_weight_of_the_model_is_not_written_by_a_replacement() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.mul(self.scale, 2)

    module = featx.symbolic_trace(Scaled())
    assert featx.replace_pattern(module, lambda x: torch.mul(x, 2), doubled_in_place) == []


def test_match_that_reads_what_another_replacement_will_write_does_not_move_behind_it() -> None:
    def model(x: Any) -> Any:
        fresh = x + 1
        early = torch.relu(fresh)
        return torch.neg(fresh) * 2 + early

    def replacement(match: Any, graph: Any, pattern: Any) -> Function:
        is_first = match.returning_nodes[0].target is torch.relu
        return (lambda x: torch.clamp_min(x, 0)) if is_first else (lambda x: x.neg_().clone())

    module = featx.symbolic_trace(model)
    either = AnyOf(torch.relu, torch.neg)
    replaced = featx.replace_pattern_with_filters(module, lambda x: either(x), replacement_callback=replacement)
    assert len(replaced) == 2
    assert torch.equal(module(*ones()), model(*ones()))


def test_in_place_call_becomes_a_plain_one_only_where_nobody_reads_what_it_wrote() -> None:
    def read_later(x: Any) -> Any:
        fresh = x + 1
        return functional.relu(fresh, inplace=True) + fresh

    def dead(x: Any) -> Any:
        return functional.relu(x + 1, inplace=True) * 2

    counts = [count_replaced(model, lambda x: functional.relu(x, inplace=True), relu) for model in (read_later, dead)]
    assert counts == [0, 1]


class Counting(nn.Module):
    """Doubles its buffer in place, through a view, after or before reading it."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.register_buffer("state", torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.state + x if self.reads == "before" else x
        doubled = self.state.view(4).mul_(2) if self.reads == "after" else self.state.mul_(2)
        return doubled + 0, self.state + x if self.reads == "after" else before


def test_write_to_a_buffer_is_kept_where_the_graph_reads_the_buffer_by_its_path() -> None:
    for reads, count in (("after", 0), ("before", 0), ("never", 1)):
        module, model = featx.symbolic_trace(Counting(reads)), Counting(reads)
        assert len(featx.replace_pattern(module, lambda x: x.mul_(2), lambda x: torch.mul(x, 2))) == count
        for _ in range(2 - count):  # what the graph reads "before" is what the last call has left
            assert all(map(torch.equal, module(*ones()), model(*ones())))
