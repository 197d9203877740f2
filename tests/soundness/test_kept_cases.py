"""Models that were traced wrongly once, as the smallest sources that showed it."""

from __future__ import annotations

import pytest
from comparison import Library, judge
from inputs import Case

import featx

LIBRARY = Library(featx.trace, featx.FeatxError, featx.create_feature_extractor, featx.get_graph_node_names)
CASES: dict[str, Case] = {}


@pytest.mark.parametrize("name", CASES)
def test_kept_case_gives_what_the_model_gives_or_refuses(name: str) -> None:
    verdict = judge(CASES[name], LIBRARY)
    assert not verdict.invalid
    assert not verdict.findings, str(verdict)
