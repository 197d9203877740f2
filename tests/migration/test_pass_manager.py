from __future__ import annotations

from typing import Any

import pytest
import torch

import featx
from featx.errors import PassError
from featx.migration.pass_manager import PassManager, PassResult, pass_result_wrapper, this_before_that_pass_constraint
from featx.passes import eliminate_common_subexpressions, eliminate_dead_code


def traced() -> featx.GraphModule:
    return featx.symbolic_trace(lambda x: torch.sin(x) + torch.sin(x))


def test_passes_of_featx_say_with_a_bool_whether_they_changed_anything() -> None:
    module = traced()
    manager = PassManager([eliminate_common_subexpressions, eliminate_dead_code])
    assert manager(module) == (module, True)
    assert manager(module) == (module, False)
    assert len(module.graph.find_nodes(op="call_function", target=torch.sin)) == 1


def test_order_of_passes_without_constraints_stays() -> None:
    order: list[int] = []

    def make(number: int) -> Any:
        def function(module: Any) -> PassResult:
            order.append(number)
            return PassResult(module, False)

        return function

    passes = [make(number) for number in range(4)]
    PassManager([*passes], [this_before_that_pass_constraint(passes[3], passes[1])])(traced())
    assert order == [0, 2, 3, 1]


def test_pass_that_gives_something_else_is_named() -> None:
    def forgetful(module: Any) -> None: ...

    def wrong(module: Any) -> int:
        return 3

    for function, message in ((forgetful, "'forgetful' failed.*pass_result_wrapper"), (wrong, "'wrong' gave a int")):
        with pytest.raises(PassError, match=message):
            PassManager([function])(traced())
    assert PassManager([pass_result_wrapper(forgetful)])(traced()).modified


def test_checks_run_and_the_graph_is_linted_after_each_pass() -> None:
    def breaking(module: featx.GraphModule) -> bool:
        nodes = list(module.graph.nodes)
        nodes[-1].append(nodes[0])
        return True

    assert PassManager([breaking])(traced()).modified
    with pytest.raises(PassError, match="'breaking' failed"):
        PassManager([breaking], run_checks_after_each_pass=True)(traced())
    seen: list[Any] = []
    manager = PassManager([eliminate_dead_code], run_checks_after_each_pass=True)
    manager.add_checks(seen.append)
    manager(traced())
    assert len(seen) == 2


def test_module_that_a_pass_returns_is_what_the_next_one_gets() -> None:
    other = traced()
    got: list[Any] = []

    def replace(module: Any) -> PassResult:
        return PassResult(other, True)

    def look(module: Any) -> bool:
        got.append(module)
        return False

    assert PassManager([replace, look])(traced()).graph_module is other
    assert got[0] is other


def test_wrapper_keeps_the_name_and_makes_a_result() -> None:
    def first(module: Any) -> Any:
        return other

    other = traced()
    wrapped = pass_result_wrapper(first)
    assert wrapped.__name__ == "first"
    assert wrapped(traced()) == (other, True)
