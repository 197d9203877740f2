"""Random graphs and patterns: what torch.fx gives where it is right, and the same values after an equivalent change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import dags
import pytest
import torch
import torch.fx
from peer import described, nodes_of

import featx

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402 - after importorskip

pytestmark = pytest.mark.fuzzing

CASES = 200


def for_random_cases(check: Any, folder: Path) -> None:
    """Call `check` with a function that draws numbers below a limit, `CASES` times."""
    hypothesis.configuration.set_hypothesis_home_dir(folder)

    @hypothesis.settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategies.data())
    def given(data: Any) -> None:
        check(lambda limit: data.draw(strategies.integers(0, limit - 1)))

    given()


def values(count: int) -> list[torch.Tensor]:
    return [torch.linspace(-2, 3 + index, dags.SIZE, dtype=torch.float64) for index in range(count)]


def test_graphs_without_effects_come_out_as_from_torch_fx(tmp_path: Path) -> None:
    tally: Counter[str] = Counter()

    def check(draw: dags.Draw) -> None:
        dag = dags.draw_dag(draw, dags.PURE)
        pattern = dags.cut(draw, dag)
        inputs = (("", ()),) * pattern.input_count
        # As many inputs and outputs as the pattern has, each output of an input of its own.
        replacement = dags.Dag(
            (*inputs, *[("neg", (index % len(inputs),)) for index in range(len(pattern.outputs))]),
            tuple(len(inputs) + index for index in range(len(pattern.outputs))),
        )
        ours, peers = dag.module(featx), dag.module(torch.fx)
        found = featx.replace_pattern(ours, pattern.module(featx), replacement.module(featx))
        ours.graph.lint()
        try:
            expected = torch.fx.replace_pattern(peers, pattern.module(torch.fx), replacement.module(torch.fx))
            peers.graph.lint()
        except (RuntimeError, AssertionError):
            tally["torch.fx fails"] += 1  # an input of the pattern stands after a reader of its output
            return
        tally["replaced" if found else "no match"] += 1
        assert described(found) == described(expected)
        assert nodes_of(ours) == nodes_of(peers)
        given = values(dag.input_count)
        assert dags.is_equal(dags.run(ours, given)[0], dags.run(peers, given)[0])

    for_random_cases(check, tmp_path)
    assert tally["replaced"] > CASES / 2, str(tally)


def test_equivalent_replacement_changes_no_output_no_draw_and_no_input(tmp_path: Path) -> None:
    tally: Counter[str] = Counter()

    def check(draw: dags.Draw) -> None:
        dag = dags.draw_dag(draw, dags.MIXED)
        pattern = dags.cut(draw, dag)
        replacement = dags.rewritten(draw, pattern)
        own = values(pattern.input_count)
        wanted, wanted_inputs, _ = dags.run(pattern.module(featx), own)
        given, given_inputs, _ = dags.run(replacement.module(featx), own)
        drops_writes = not dags.is_equal(wanted_inputs, given_inputs)
        writes_otherwise = any(
            not torch.equal(one, other) and not torch.equal(other, before)
            for one, other, before in zip(wanted_inputs, given_inputs, own, strict=True)
        )
        if writes_otherwise or not dags.is_equal(wanted, given):
            tally["not equivalent"] += 1
            return
        module = dag.module(featx)
        inputs = values(dag.input_count)
        outputs, changed, drawn = dags.run(module, inputs)
        found = featx.replace_pattern(module, pattern.module(featx), replacement.module(featx))
        module.graph.lint()
        tally["replaced" if found else "kept"] += 1
        tally["replaced in another way"] += bool(found) and pattern != replacement
        new_outputs, new_changed, new_drawn = dags.run(module, inputs)
        assert dags.is_equal(outputs, new_outputs)
        assert torch.equal(drawn, new_drawn)
        # A write to an input of the graph that nothing reads may go: that is what was asked for.
        assert drops_writes or dags.is_equal(changed, new_changed)

    for_random_cases(check, tmp_path)
    assert tally["replaced"] > CASES / 3, str(tally)
    assert tally["replaced in another way"] > CASES / 10, str(tally)
