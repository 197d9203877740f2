"""Code that is made in a test, with source that Python can look up, as that of a cell of a notebook.

pytest rewrites each assert of a test file, so that the source of a function there that has one is not its code.
"""

from __future__ import annotations

import itertools
import linecache
from typing import Any

_NUMBERS = itertools.count()


def run_source(source: str, **names: Any) -> dict[str, Any]:
    """Run `source` with these globals, and return the globals that it leaves."""
    name = f"<source {next(_NUMBERS)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)
    return names
