"""Turn generated source into a function whose lines show up in tracebacks and in `inspect.getsource`."""

from __future__ import annotations

import hashlib
import linecache
from types import FunctionType
from typing import Any, cast


def load_function(source: str, global_names: dict[str, Any], name: str = "forward") -> FunctionType:
    """Execute `source`, which defines a function called `name`, and return that function.

    The source is entered into `linecache` under a name made from its text, so equal text has one entry however often
    it is loaded. O(length of the source).
    """
    filename = f"<featx {hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(global_names)
    exec(compile(source, filename, "exec"), namespace)
    return cast(FunctionType, namespace[name])
