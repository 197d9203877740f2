"""Say in an error which node raised it, and where that node is in the model."""

from __future__ import annotations

import linecache

from featx.ir.names import shown_name
from featx.ir.node import Node


def describe(node: Node) -> str:
    """Return the line of `node` in its graph and, where the tracer left them, its module and its line in the model."""
    lines = [f"While executing {node.format_node()}"]
    name = shown_name(node)
    named = "" if name == node.name else f", named '{name}'"
    stack = node.meta.get("nn_module_stack")
    if stack:
        path, kind = list(stack.values())[-1]
        lines.append(f"in module '{path}' ({getattr(kind, '__name__', kind)}){named}")
    source = node.meta.get("source")
    if source:
        file, _, number = source.rpartition(":")
        line = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
        lines.append(f"at {source}: `{line}`" if line else f"at {source}")
    elif node.stack_trace:
        lines.append(node.stack_trace)
    return "\n".join(lines)
