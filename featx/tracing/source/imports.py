"""What import statements inside a function bind."""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import lru_cache
from types import FunctionType
from typing import Any

from featx.tracing.source.location import Function, definition_of


def imported_in(function: FunctionType) -> dict[str, Any]:
    """Return the modules, functions and classes that a function imports itself, by the name that it gives them.

    What nothing has imported before is left out, and so is all where there is no source.
    """
    definition = definition_of(function)
    return {} if definition is None else _imported_in(definition, function.__globals__.get("__package__") or "")


@lru_cache(maxsize=4096)
def _imported_in(definition: Function, package: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(definition):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                found[each.asname or first] = sys.modules.get(each.name if each.asname else first)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
            owner = sys.modules.get(name)
            for each in node.names:
                inner = sys.modules.get(f"{name}.{each.name}")
                found[each.asname or each.name] = vars(owner).get(each.name, inner) if owner else inner
    return {name: value for name, value in found.items() if value is not None}
