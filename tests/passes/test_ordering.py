from featx.passes.ordering import first_order


def test_order_is_the_first_that_the_edges_allow() -> None:
    assert first_order(4, []) == [0, 1, 2, 3]
    assert first_order(4, [(3, 0), (1, 0)]) == [1, 2, 3, 0]
    assert first_order(3, [(2, 1), (1, 0)]) == [2, 1, 0]


def test_edge_that_is_given_twice_counts_as_one() -> None:
    assert first_order(2, [(1, 0), (1, 0)]) == [1, 0]


def test_cycles_and_what_waits_for_them_are_missing() -> None:
    assert first_order(4, [(0, 1), (1, 0), (1, 2)]) == [3]
