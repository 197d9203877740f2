"""What is no graph module is refused by every pass, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import featx
from featx import passes

ENTRIES: dict[str, Callable[[Any], object]] = {
    "eliminate_dead_code": passes.eliminate_dead_code,
    "eliminate_common_subexpressions": passes.eliminate_common_subexpressions,
    "fold_constants": passes.fold_constants,
    "fuse_conv_bn": passes.fuse_conv_bn,
    "remove_dropout": passes.remove_dropout,
    "normalize_arguments": passes.normalize_arguments,
    "split_module": lambda module: passes.split_module(module, None, lambda node: 0),
    "split_at": lambda module: passes.split_at(module, ["0"]),
    "partition": lambda module: passes.partition(module, lambda node: True),
    "extract_subgraph": lambda module: passes.extract_subgraph(module, "0", "1"),
    "replace_pattern": lambda module: featx.replace_pattern(module, lambda x: torch.relu(x), lambda x: torch.neg(x)),
    "PassManager": passes.PassManager([passes.remove_dropout]).run,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_module_that_was_not_traced_is_refused_with_the_way_to_trace_it(entry: str) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"got Sequential; trace the module first: featx.trace"):
        ENTRIES[entry](nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())


@pytest.mark.parametrize("entry", ENTRIES)
def test_module_of_torch_fx_is_refused_with_the_way_to_convert_it(entry: str) -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    with pytest.raises(featx.ArgumentTypeError, match=r"from_torch_fx"):
        ENTRIES[entry](traced)


@pytest.mark.parametrize("repeats", [0, 1.5, "2"])
def test_number_of_repeats_that_is_none_is_refused(repeats: Any) -> None:
    traced = featx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(featx.ArgumentTypeError, match="repeats"):
        passes.profile(traced, torch.rand(2, 4), repeats=repeats)
