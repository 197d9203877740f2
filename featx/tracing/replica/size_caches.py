"""Dicts of a replica that are caches: they were empty at first, and all their keys are made of numbers of traces."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from types import FunctionType
from typing import Any, cast

from torch import nn

from featx.rebuilding import contents_of_cell
from featx.tracing.file_globals.holders import Holder
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.objects.containers import DEPTH_IN_MODULES, containers_in

# A container of more items is no place for caches.
_LARGEST = 10_000


class SizeCaches:
    """The caches that calls of one replica were seen to use.

    Args:
        modules: the modules of the replica.
        outside: what holds other values that the code of the model keeps between calls.
    """

    def __init__(self, modules: Iterable[nn.Module], outside: Iterable[Holder]) -> None:
        self._modules = modules
        self._outside = outside
        # By id; holding them keeps an id from being used again.
        self._known: dict[int, dict[Any, Any]] = {}
        # The texts of sizes that were a part of keys of each of them.
        self._texts: dict[int, set[str]] = {}

    def accept_as_caches(self, dicts: Iterable[dict[Any, Any]], *, has_tuples: bool = False) -> bool:
        """Take dicts that are empty now for caches of that kind; say whether all of these are such caches. O(keys).

        With `has_tuples`, they are looked up by tuples. A dict that a call makes is a cache then too. By numbers it may
        group things, and code may look it up by constants.
        """
        return all(self._is_cache(each, has_tuples=has_tuples) for each in dicts)

    def _is_cache(self, candidate: dict[Any, Any], *, has_tuples: bool) -> bool:
        if not candidate and id(candidate) not in self._known and (has_tuples or self._is_kept(candidate)):
            self._known[id(candidate)] = candidate
        # What a text was made of is not to be seen in it.
        return id(candidate) in self._known and all(
            type(key) is str or _is_traced(key) for key in dict.__iter__(candidate)
        )

    def _is_kept(self, candidate: dict[Any, Any]) -> bool:
        """Say whether the model keeps a dict between calls."""
        of_modules = [value for module in self._modules for value in vars(module).values()]
        of_functions = (held for value in of_modules if type(value) is FunctionType for held in _held_by(value))
        found = containers_in((*of_modules, *of_functions), DEPTH_IN_MODULES, _LARGEST)
        return any(each is candidate for each in chain(found, (holder.value for holder in self._outside)))

    def note_text(self, dicts: Iterable[dict[Any, Any]], text: str) -> None:
        """Take note that a size, which is written so, is a part of a text that these caches are looked up by."""
        for each in dicts:
            self._texts.setdefault(id(each), set()).add(text)

    def have_other_keys(self) -> bool:
        """Say whether one of them has a text as a key that no noted size is a part of. To be asked after a call."""
        return any(
            not any(text in key for text in texts)
            for place, texts in self._texts.items()
            for key in dict.__iter__(self._known[place])
            if type(key) is str
        )

    def forget(self) -> None:
        """Let go of all of them."""
        self._known, self._texts = {}, {}


def _held_by(function: FunctionType) -> list[Any]:
    return [*map(contents_of_cell, function.__closure__ or ()), *(function.__defaults__ or ())]


def _is_traced(key: Any) -> bool:
    if type(key) is tuple:
        return any(map(_is_traced, cast(tuple[Any, ...], key)))
    return isinstance(key, TracedNumber)
