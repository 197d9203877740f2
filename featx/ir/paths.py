"""Dotted paths of modules and nodes: those around a path, and those that are spelled like it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator


def parents_of(path: str) -> Iterator[str]:
    """Yield the paths around `path` without the root, the nearest first: `a.b.c` gives `a.b` and `a`."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence for an error, with a space ahead of it, that names what is spelled like `name`, if anything."""
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
