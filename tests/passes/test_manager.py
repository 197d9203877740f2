from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from featx import GraphModule, symbolic_trace
from featx.errors import ArgumentTypeError, PassError
from featx.passes import PassManager, eliminate_dead_code, fuse_conv_bn, remove_dropout, this_before_that


def traced() -> GraphModule:
    return symbolic_trace(lambda x: torch.relu(x) + 1)


def a(gm: GraphModule) -> bool:
    return False


def b(gm: GraphModule) -> bool:
    return False


def c(gm: GraphModule) -> bool:
    return False


def double(gm: GraphModule) -> bool:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(torch.mul, (output.args[0], 2)),)
    return True


def test_passes_run_in_the_order_in_which_they_are_given() -> None:
    assert PassManager([c, a, b]).passes == [c, a, b]


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        ([this_before_that(a, c)], [b, a, c]),
        ([this_before_that(a, b), this_before_that(a, c)], [a, c, b]),
        ([this_before_that(a, b), this_before_that(b, c)], [a, b, c]),
        ([lambda first, second: first is not c], [b, a, c]),
    ],
)
def test_constraints_move_only_what_they_must(constraints: Any, expected: Any) -> None:
    assert PassManager([c, b, a], constraints).passes == expected


def test_constraints_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(PassError, match="between a, b"):
        PassManager([a, b, c], [this_before_that(a, b), this_before_that(b, a)])


def test_it_says_whether_anything_changed() -> None:
    gm = traced()
    assert not PassManager([a, b]).run(gm)
    assert PassManager([a, double, b]).run(gm)
    assert gm(torch.ones(1)).item() == 4


def test_steps_end_when_nothing_changes() -> None:
    gm = traced()
    runs: list[int] = []

    def count(gm: GraphModule) -> bool:
        runs.append(1)
        return len(runs) < 3

    assert PassManager([count], steps=10).run(gm)
    assert len(runs) == 3
    PassManager([double], steps=3).run(gm)
    assert gm(torch.ones(1)).item() == 16


def test_graph_that_a_pass_breaks_is_found_after_it() -> None:
    def breaks(gm: GraphModule) -> bool:
        relu, add = list(gm.graph.nodes)[1:3]
        add.append(relu)
        return True

    def never(gm: GraphModule) -> bool:
        raise AssertionError("it runs after a broken graph")

    with pytest.raises(PassError, match="after pass 'breaks', lint raised GraphError: node 'add' reads 'relu' before"):
        PassManager([a, breaks, never]).run(traced())


def test_error_of_a_pass_names_it() -> None:
    def fails(gm: GraphModule) -> bool:
        raise KeyError("what it needs")

    with pytest.raises(PassError, match="pass 'fails' raised KeyError: 'what it needs'") as caught:
        PassManager([a, fails]).run(traced())
    assert isinstance(caught.value.__cause__, KeyError)


def test_pass_that_returns_something_else_than_a_bool_is_refused() -> None:
    def returns_module(gm: GraphModule) -> Any:
        return gm

    with pytest.raises(PassError, match="pass 'returns_module' returned GraphModule"):
        PassManager([returns_module]).run(traced())


def test_checks_run_before_and_after_each_pass() -> None:
    seen: list[int] = []

    def at_most_five_nodes(gm: GraphModule) -> None:
        seen.append(len(gm.graph.nodes))
        assert len(gm.graph.nodes) <= 5, f"{len(gm.graph.nodes)} nodes"

    with pytest.raises(
        PassError, match="after pass 'double', check 'at_most_five_nodes' raised AssertionError: 6 nodes"
    ):
        PassManager([a, double, double, b], checks=[at_most_five_nodes]).run(traced())
    assert seen == [4, 4, 5, 6]
    with pytest.raises(PassError, match="before any pass, check"):
        PassManager([a], checks=[at_most_five_nodes]).run(symbolic_trace(lambda x: x + 1 + 1 + 1 + 1))


@pytest.mark.parametrize(
    "options", [{"passes": ["a"]}, {"constraints": [1]}, {"checks": [None]}, {"steps": 0}, {"steps": "2"}]
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError):
        PassManager(**{"passes": [a], **options})


def test_passes_of_featx_work_together() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU()).double().eval()
    gm = symbolic_trace(model)
    manager = PassManager(
        [fuse_conv_bn, remove_dropout, eliminate_dead_code], [this_before_that(remove_dropout, fuse_conv_bn)]
    )
    assert manager.passes == [remove_dropout, fuse_conv_bn, eliminate_dead_code]
    assert manager.run(gm)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(gm(x), model(x), rtol=1e-10, atol=1e-10)
    assert not manager.run(gm)
