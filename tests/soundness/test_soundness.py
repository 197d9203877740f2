"""Random models, traced on an example: each later call gives what the model gives, bit for bit, or refuses.

`python benchmarks/soundness.py --cases 10000` draws more of them.
"""

from __future__ import annotations

from pathlib import Path

import grammar
import pytest
from comparison import Library, judge
from programs import Program
from tally import Tally, shrink

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402 - after importorskip

pytestmark = pytest.mark.fuzzing

# Several draws, so that they run side by side.
DRAWS, CASES = 4, 50


@strategies.composite
def programs(draw: hypothesis.strategies.DrawFn) -> Program:
    return grammar.draw(lambda limit: draw(strategies.integers(0, limit - 1)))


@pytest.mark.parametrize("draw", range(DRAWS))
def test_traced_random_models_give_what_the_models_give_or_refuse(draw: int, library: Library, tmp_path: Path) -> None:
    hypothesis.configuration.set_hypothesis_home_dir(tmp_path)
    tally, wrong = Tally(), []

    @hypothesis.seed(draw)
    @hypothesis.settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        # A program shrinks better by its own lines than by the choices that made it.
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def check(program: Program) -> None:
        verdict = judge(program.case, library)
        tally.add(verdict)
        if verdict.findings:
            wrong.append((program, str(verdict)))

    check()
    if wrong:
        program, verdict = min(wrong, key=lambda pair: len(pair[0].case.source))
        small = shrink(program, library)
        pytest.fail(
            f"{len(wrong)} models, one of them:\n{verdict}\n\nmade smaller:\n{judge(small.case, library)}\n\n"
            f"{small.case}\n{tally}",
            pytrace=False,
        )
    # A tracer that refuses everything, or a grammar that it cannot follow, would prove nothing.
    assert tally.share("compared at another size") >= 0.4, str(tally)
    assert tally.cases["run"] >= 0.8 * CASES, str(tally)
