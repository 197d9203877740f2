"""Find code that asks for the kind of a device, which torch answers without telling anybody."""

from __future__ import annotations

import ast
import functools
from types import CodeType

from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import codes_in, source_of

_ASKED = frozenset({"type", "index"})


@functools.lru_cache(maxsize=4096)
def asks_for_kind_of_device(code: CodeType) -> bool:
    """Say whether `code`, or code inside it, asks of which kind a device is: `device.type`, `device == "cpu"`,
    `"cuda" in str(device)`.

    A device is what has "device" in its name, or the name `dev`: `x.device`, `input_device`. Code of torch does not
    count.
    Without source: wherever it reads an attribute `type` at all.
    """
    if is_library_code(code):
        return False
    names = {name for each in codes_in(code) for name in (*each.co_names, *each.co_varnames)}
    if not any(map(_is_name_of_device, names)):
        return False
    source = source_of(code)
    definition = None if source is None else source.function_of(code)
    if source is None or definition is None:
        return "type" in names
    return any(_asks(node, source.parents.get(node)) for node in ast.walk(definition))


def _asks(node: ast.AST, parent: ast.AST | None) -> bool:
    if isinstance(node, ast.Attribute):
        is_method = isinstance(parent, ast.Call) and parent.func is node
        return node.attr in _ASKED and not is_method and _is_device(node.value)
    if isinstance(node, ast.Compare):  # with a text, or a kind; two tensors move together
        are_devices = [_is_device(side) for side in (node.left, *node.comparators)]
        return any(are_devices) and not all(are_devices)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        # `"cuda" in str(x.device)`. As the key of a cache the text decides nothing.
        return any(map(_is_device, node.args)) and isinstance(parent, (ast.Compare, ast.Attribute))
    return False


def _is_device(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return _is_name_of_device(name)


def _is_name_of_device(name: str) -> bool:
    return "device" in name or name == "dev"
