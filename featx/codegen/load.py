"""Turn generated source into a function whose lines show up in tracebacks and in `inspect.getsource`."""

from __future__ import annotations

import hashlib
import linecache
import weakref
from types import FunctionType
from typing import Any, cast


def load_function(source: str, global_names: dict[str, Any], name: str = "forward") -> FunctionType:
    """Execute `source`, which defines a function called `name`, and return that function.

    The source is entered into `linecache` under a name made from its text, so equal text has one entry however often
    it is loaded, and none when the last of these functions is gone. O(length of the source).
    """
    filename = f"<featx {hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()[:16]}>"
    namespace = dict(global_names)
    exec(compile(source, filename, "exec"), namespace)
    function = cast(FunctionType, namespace[name])
    known: Any = linecache.getlines(filename)
    lines = known if isinstance(known, _Lines) else _Lines(source.splitlines(keepends=True))
    linecache.cache[filename] = (len(source), None, lines, filename)
    lines.loaded.append(filename)
    # Of the code and not of the function: a traceback may outlive that.
    weakref.finalize(function.__code__, _unload, filename, lines).atexit = False
    return function


class _Lines(list[str]):
    """The lines of a source, which note how many functions have been loaded from it."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(lines)
        self.loaded: list[str] = []


def _unload(filename: str, lines: _Lines) -> None:
    lines.loaded.pop()
    if not lines.loaded and linecache.getlines(filename) is lines:
        linecache.cache.pop(filename, None)
