"""Random models, traced on an example: each later call gives what the model gives, bit for bit, or refuses.

`python benchmarks/soundness.py --cases 10000` draws more of them, and `--cases 50 --seed DRAW` these.
"""

from __future__ import annotations

import random

import grammar
import pytest
from comparison import Library, judge
from tally import Tally, shrink

pytestmark = pytest.mark.fuzzing

# Several draws, so that they run side by side.
DRAWS, CASES = 4, 50


@pytest.mark.parametrize("draw", range(DRAWS))
def test_traced_random_models_give_what_the_models_give_or_refuse(draw: int, library: Library) -> None:
    tally, wrong = Tally(), []
    for number in range(CASES):
        program = grammar.draw(random.Random(f"{draw} {number}").randrange)
        verdict = judge(program.case, library)
        tally.add(verdict)
        if verdict.findings:
            wrong.append((program, str(verdict)))
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
