"""Find which keys of a dict that a function is given the function reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType

from featx.tracing.source.location import Function, definition_of
from featx.tracing.source.parameters import Parameters
from featx.tracing.source_uses.lookups import looked_up

# Functions that see a variable without its name.
_SEEING_ALL = frozenset({"locals", "vars", "eval", "exec"})


def keys_read(function: FunctionType, parameter: str) -> tuple[str, ...] | None:
    """Return the keys that a function reads of the dict `parameter`, if it does nothing else with it. O(source).

    That is `batch["image"]`, `batch.get("image")` and `"image" in batch`. Where it does something else with the dict,
    such as to pass it on, and without source, the answer is None.
    """
    definition = definition_of(function)
    if definition is None:
        return None
    return _keys_read(definition, parameter) if parameter in Parameters(definition).named else None


@lru_cache(maxsize=1024)
def _keys_read(definition: Function, parameter: str) -> tuple[str, ...] | None:
    nodes = list(ast.walk(definition))
    found = [(use, key) for node in nodes for use, key in _key_use(node) if use.id == parameter]
    uses = {use for use, _ in found}
    names = [node for node in nodes if isinstance(node, ast.Name) and node not in uses]
    is_all = not any(name.id in (parameter, *_SEEING_ALL) for name in names)
    return tuple(sorted({key for _, key in found})) if is_all else None


def _key_use(node: ast.AST) -> Iterator[tuple[ast.Name, str]]:
    """Yield the name and the key, where a node reads a constant key of what a name stands for."""
    match node, looked_up(node):
        case (
            (ast.Subscript(ctx=ast.Load()) | ast.Call(func=ast.Attribute(attr="get")) | ast.Compare()),
            (
                ast.Name() as use,
                ast.Constant(value=str(key)),
            ),
        ):
            yield use, key
        case _:
            pass
