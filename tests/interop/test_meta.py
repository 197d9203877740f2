from __future__ import annotations

import collections
from typing import Any

import featx
from featx.interop.meta import Translation

Pair = collections.namedtuple("Pair", "a b")


def test_nodes_are_replaced_wherever_they_stand() -> None:
    one, other = featx.Graph(), featx.Graph()
    x, twin = one.placeholder("x"), other.placeholder("x")
    meta: dict[str, Any] = {"n": x, "l": [x], "t": (1, (x,)), "d": {"k": [x]}, "p": Pair(x, 1), "s": slice(x, 2)}
    found = Translation({x: twin}, featx.Node).meta(meta)
    assert found["n"] is twin
    assert found["l"] == [twin]
    assert found["t"] == (1, (twin,))
    assert found["d"] == {"k": [twin]}
    assert found["p"] == Pair(twin, 1)
    assert type(found["p"]) is Pair
    assert found["s"].start is twin
    assert meta["l"] == [x], "the old one is left alone"


def test_values_without_nodes_stay_themselves() -> None:
    foreign = featx.Graph().placeholder("y")
    meta = {"l": [1], "t": (2, [3]), "d": {"k": object()}, "p": Pair(1, 2), "foreign": foreign, "o": object()}
    found = Translation({}, featx.Node).meta(meta)
    assert found is not meta
    assert all(found[key] is value for key, value in meta.items())


def test_container_that_many_nodes_share_stays_one() -> None:
    one, other = featx.Graph(), featx.Graph()
    x, twin = one.placeholder("x"), other.placeholder("x")
    shared = [x]
    translation = Translation({x: twin}, featx.Node)
    assert translation.meta({"a": shared})["a"] is translation.meta({"b": shared})["b"]
