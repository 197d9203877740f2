"""Every pass on random graphs: values, state, memory shared and random draws as before, bit for bit."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import featx
from featx import Interpreter, Node, passes
from featx.errors import FeatxError, PassError
from featx.ir.effects import Effects
from featx.tree import clone_tensors
from passes.random_graphs import Choose, build, check_pass, choosing_with

pytestmark = pytest.mark.fuzzing

CASES = 120


def for_random_graphs(check: Callable[[Choose], str], cases: int = CASES) -> Counter[str]:
    """Call `check` with functions that draw numbers below a limit, and count what it says."""
    tally: Counter[str] = Counter()
    for seed in range(cases):
        try:
            tally[check(choosing_with(seed))] += 1
        except Exception as error:
            raise AssertionError(f"with the random graph {seed}: {error}") from error
    return tally


def fuse(gm: featx.GraphModule) -> bool:
    return not gm.training and passes.fuse_conv_bn(gm)


def with_manager(gm: featx.GraphModule) -> bool:
    order = [passes.eliminate_common_subexpressions, passes.fold_constants, passes.remove_dropout]
    return passes.PassManager([*order, passes.normalize_arguments, passes.eliminate_dead_code], steps=3).run(gm)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        # In the other mode dead code is what it is in that mode.
        (passes.eliminate_dead_code, {"both_modes": False}),
        (passes.eliminate_common_subexpressions, {}),
        (passes.fold_constants, {}),
        (lambda gm: passes.fold_constants(gm, include_trainable=True), {"needs_gradients": False}),
        (passes.remove_dropout, {}),
        (fuse, {}),
        (passes.normalize_arguments, {}),
        (with_manager, {"both_modes": False}),
    ],
    ids=["dead", "cse", "constants", "trainable", "dropout", "fuse", "normalize", "manager"],
)
def test_edited_graph_does_what_it_did(change: Any, options: dict[str, bool]) -> None:
    changed: Counter[bool] = Counter()

    def change_and_count(gm: featx.GraphModule) -> None:
        code = gm.code
        said = change(gm)
        assert said is (gm.code != code)
        changed[said] += 1

    def check(choose: Choose) -> str:
        return str(check_pass(change_and_count, choose, **options))

    assert for_random_graphs(check)["True"] > CASES // 2
    assert changed[True] or change is fuse  # a norm right after a linear layer is rare


def test_split_graph_does_what_it_did() -> None:
    def check(choose: Choose) -> str:
        answers: list[str] = []

        def split(gm: featx.GraphModule) -> featx.GraphModule:
            parts, width = 1 + choose(4), 1 + choose(8)
            # Mostly one part after the other; with a random part here and there, they need each other.
            keys = {
                node: choose(parts) if choose(8) == 7 else index // width % parts
                for index, node in enumerate(gm.graph.nodes)
            }
            before = str(gm.graph)
            try:
                result = passes.split_module(gm, None, keys.__getitem__, tuple_return=choose(2) == 1)
            except PassError:
                answers.append("refused")
                return gm
            finally:
                assert str(gm.graph) == before
            answers.append("split")
            return result

        return answers[0] if check_pass(split, choose) else "none"

    tally = for_random_graphs(check)
    assert tally["split"] > CASES // 3
    assert tally["refused"] > 5


def test_partitioned_graph_does_what_it_did() -> None:
    def check(choose: Choose) -> str:
        def split(gm: featx.GraphModule) -> featx.GraphModule:
            supported = {node: choose(3) > 0 for node in gm.graph.nodes}
            return passes.partition(gm, supported.__getitem__, min_nodes=1 + choose(2))

        return str(check_pass(split, choose))

    assert for_random_graphs(check)["True"] > CASES // 2


class Recorder(Interpreter):
    """Keeps a copy of each value as it was when it was computed."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.seen[n.name] = clone_tensors(value)
        return value


def test_extracted_graph_computes_what_the_whole_does() -> None:
    def check(choose: Choose) -> str:
        gm = build(choose)
        gm.train(bool(choose(2)))
        effects = Effects(gm.graph, gm)
        if any(effects.of(node).is_random for node in gm.graph.nodes):
            return "draws"  # an extracted graph draws less
        whole = Recorder(copy.deepcopy(gm))
        try:
            whole.run(torch.rand(4, 4) - 0.5, torch.rand(4, 4) - 0.5)
        except (FeatxError, RuntimeError, ValueError, IndexError, TypeError):
            return "does not run"
        tensors = [
            node
            for node in gm.graph.nodes
            if node.op != "output" and isinstance(whole.seen.get(node.name), torch.Tensor)
        ]
        wanted = [tensors[choose(len(tensors))] for _ in range(1 + choose(3))]
        is_from_start = choose(2) == 1
        given = [node for node in tensors if node.op == "placeholder"]
        if not is_from_start:
            given = list(dict.fromkeys([tensors[choose(len(tensors))] for _ in range(choose(4))]))
        try:
            extracted = passes.extract_subgraph(gm, given, wanted)
        except PassError:
            return "refused"
        extracted.graph.lint()
        results = copy.deepcopy(extracted)(*[whole.seen[node.name].clone() for node in given])
        expected = tuple(whole.seen[node.name] for node in wanted)
        torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
        return "from the start" if is_from_start else "from the middle"

    tally = for_random_graphs(check, cases=2 * CASES)
    assert tally["from the start"] > 15
    assert tally["from the middle"] > 15
    assert tally["refused"] > 5
