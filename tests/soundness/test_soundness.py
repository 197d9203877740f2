"""Random models, traced on an example: each later call gives what the model gives, bit for bit, or refuses.

`python benchmarks/soundness.py --cases 10000` draws more of them.
"""

from __future__ import annotations

from pathlib import Path

import grammar
import pytest
import torch
from comparison import Library, judge
from tally import Tally

import featx

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402 - after importorskip

CASES = 200
LIBRARY = Library(featx.trace, featx.FeatxError, featx.create_feature_extractor, featx.get_graph_node_names)


@strategies.composite
def programs(draw: hypothesis.strategies.DrawFn) -> grammar.Program:
    return grammar.draw(lambda limit: draw(strategies.integers(0, limit - 1)))


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One thread, and no files of hypothesis in the tree."""
    torch.set_num_threads(1)
    hypothesis.configuration.set_hypothesis_home_dir(Path(tmp_path_factory.getbasetemp()) / "hypothesis")


def test_traced_random_models_give_what_the_models_give_or_refuse() -> None:
    tally = Tally()

    @hypothesis.settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def check(program: grammar.Program) -> None:
        verdict = judge(program.case, LIBRARY)
        tally.add(verdict)
        assert not verdict.findings, f"\n{verdict}\n\n{program.case}"

    check()
    # A tracer that refuses everything, or a grammar that it cannot follow, would prove nothing.
    assert tally.share("compared at another size") >= 0.4, str(tally)
    assert tally.cases["run"] >= 0.8 * CASES, str(tally)
