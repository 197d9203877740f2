"""Dicts of a replica that are caches: they were empty at first, and all their keys are made of numbers of traces."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

from torch import nn

from featx.tracing.file_globals.holders import Holder
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.objects.containers import DEPTH_IN_MODULES, containers_in


class SizeCaches:
    """The caches that calls of one replica were seen to use.

    Args:
        modules: the modules of the replica.

    Attributes:
        outside: what holds other values that the code of the model keeps between calls.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self.outside: Iterable[Holder] = ()
        # By id; holding them keeps an id from being used again.
        self._known: dict[int, dict[Any, Any]] = {}
        # The texts of sizes that were a part of keys of each of them.
        self._texts: dict[int, set[str]] = {}

    def are_caches(self, dicts: Iterable[dict[Any, Any]]) -> bool:
        """Say whether all of these are such caches, and remember those that are empty now. O(keys)."""
        return all(map(self._is_cache, dicts))

    def _is_cache(self, candidate: dict[Any, Any]) -> bool:
        if not candidate and id(candidate) not in self._known and self._is_kept(candidate):
            self._known[id(candidate)] = candidate
        # What a text was made of is not to be seen in it.
        return id(candidate) in self._known and all(type(key) is str or _is_traced(key) for key in candidate)

    def _is_kept(self, candidate: dict[Any, Any]) -> bool:
        """Say whether the model keeps a dict between calls. One that a call makes may group things by their sizes."""
        of_modules = (value for module in self._modules for value in vars(module).values())
        found = (containers_in(of_modules, DEPTH_IN_MODULES), (holder.value for holder in self.outside))
        return any(each is candidate for each in chain.from_iterable(found))

    def note_text(self, dicts: Iterable[dict[Any, Any]], text: str) -> None:
        """Take note that a size, which is written so, is a part of a text that these caches are looked up by."""
        for each in dicts:
            self._texts.setdefault(id(each), set()).add(text)

    def have_other_keys(self) -> bool:
        """Say whether one of them has a text as a key that no noted size is a part of. To be asked after a call."""
        return any(
            not any(text in key for text in texts)
            for place, texts in self._texts.items()
            for key in self._known[place]
            if type(key) is str
        )

    def forget(self) -> None:
        """Let go of all of them."""
        self._known, self._texts = {}, {}


def _is_traced(key: Any) -> bool:
    if type(key) is tuple:
        return any(map(_is_traced, cast(tuple[Any, ...], key)))
    return isinstance(key, TracedNumber)
