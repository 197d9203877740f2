"""What messages suggest in place of a name that is not there."""

from __future__ import annotations

from featx.ir.paths import did_you_mean


def test_a_name_is_suggested_once() -> None:
    assert did_you_mean("bas", ["base", "other", "base"]) == " Did you mean 'base'?"
