"""Arguments are walked in the order in which a reader meets what they hold."""

from featx.ir.arguments import leaves_of


def test_leaves_are_met_in_order() -> None:
    assert list(leaves_of([1, (2, {"a": 3}), slice(4, None, 5), "six"])) == [1, 2, 3, 4, None, 5, "six"]
