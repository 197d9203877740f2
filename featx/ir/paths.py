"""Dotted paths of modules and nodes: those around a path, and those that are spelled like it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def parents_of(path: str) -> list[str]:
    """Return the paths around `path` without the root, the nearest first: `a.b.c` gives `a.b` and `a`."""
    found: list[str] = []  # a generator that is not run to its end would swallow an interrupt
    while "." in path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence for an error, with a space ahead of it, that names what is spelled like `name`, if anything."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
