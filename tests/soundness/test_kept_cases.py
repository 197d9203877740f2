"""Models that were traced wrongly once, as the smallest sources that showed it."""

from __future__ import annotations

import pytest
from comparison import Library, judge
from inputs import Case

CASES: dict[str, Case] = {}


@pytest.mark.parametrize("name", CASES)
def test_kept_case_gives_what_the_model_gives_or_refuses(name: str, library: Library) -> None:
    verdict = judge(CASES[name], library)
    assert not verdict.invalid
    assert not verdict.findings, str(verdict)
