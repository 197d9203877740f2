"""Parse Python source, while other threads may parse too."""

from __future__ import annotations

import ast

_ATTEMPTS = 5


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree of a text; None if it is no Python, or too deep.

    Python 3.11 raises SystemError where two threads parse at the same time.
    """
    for _ in range(_ATTEMPTS):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        except SystemError:
            continue
    return None
