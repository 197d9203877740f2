"""Dicts of a replica that are caches: they were empty at first, and all their keys are made of numbers of traces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from featx.tracing.guards.scalars import TracedFloat, TracedInt


class SizeCaches:
    """The caches that calls of one replica were seen to use."""

    def __init__(self) -> None:
        # By id; holding them keeps an id from being used again.
        self._known: dict[int, dict[Any, Any]] = {}

    def are_caches(self, dicts: Iterable[dict[Any, Any]]) -> bool:
        """Say whether all of these are such caches, and remember those that are empty now. O(keys)."""
        return all(map(self._is_cache, dicts))

    def _is_cache(self, candidate: dict[Any, Any]) -> bool:
        if not candidate:
            self._known[id(candidate)] = candidate
        # What a text was made of is not to be seen in it.
        return id(candidate) in self._known and all(type(key) is str or _is_traced(key) for key in candidate)

    def forget(self) -> None:
        """Let go of all of them."""
        self._known = {}


def _is_traced(key: Any) -> bool:
    if type(key) is tuple:
        return any(map(_is_traced, cast(tuple[Any, ...], key)))
    return type(key) in (TracedInt, TracedFloat)
