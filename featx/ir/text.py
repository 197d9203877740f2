"""Turn nodes and graphs into the lines and tables that people read, in torch.fx's forms."""

from __future__ import annotations

from collections.abc import Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.ir.arguments import Argument
from featx.ir.names import name_to_ask, qualified_name
from featx.ir.node import Node, Target

if TYPE_CHECKING:
    from featx.ir.graph import Graph


def format_graph(graph: Graph) -> str:
    """Describe a graph, a node a line. The name to ask for a node follows where the line does not show it.

    O(nodes + edges).
    """
    targets: dict[Target, str] = {}
    lines = ["graph():"]
    for node in graph.nodes:
        asked = name_to_ask(node)
        remark = "" if asked is None else f"  # {asked if asked.isprintable() else repr(asked)}"
        lines.append(f"{format_node(node, targets=targets)}{remark}")
    return "\n    ".join(lines)


def format_node(
    node: Node,
    placeholder_names: list[str] | None = None,
    maybe_return_typename: list[str] | None = None,
    targets: dict[Target, str] | None = None,
    annotation: str | None = None,
) -> str | None:
    """Describe a node in one line, with `annotation` in place of its type.

    `placeholder_names`, where it holds a first name already, collects placeholders (None is returned for them), and
    `maybe_return_typename[0]` gets the return annotation, for a caller that prints a signature. `targets` remembers the
    names of functions, which are most of the cost, for a caller that formats many nodes.
    """
    op = node.op
    if op == "output":
        if node.type is not None and maybe_return_typename:
            maybe_return_typename[0] = f" -> {format_type(node.type)}"
        return f"return {node.args[0]}"
    if annotation is None:
        annotation = "" if node.type is None else f"{format_type(node.type)} "
    target = node.target
    if not isinstance(target, str):
        known = None if targets is None else targets.get(target)
        target = known or format_target(target)
        if targets is not None:
            targets[node.target] = target
    head = f"%{node.name} : {annotation}[num_users={len(node.users)}] = {op}[target={target}]"
    if op == "placeholder":
        if placeholder_names:
            placeholder_names.append(node.target if node.type is None else f"{node.target}: {format_type(node.type)}")
            return None
        return f"{head}(default={node.args[0]})" if node.args else head
    if op == "get_attr":
        return head
    kwargs = _format_argument(node.kwargs) if node.kwargs else "{}"
    return f"{head}(args = {_format_argument(node.args)}, kwargs = {kwargs})"


def tensor_annotation(meta: Mapping[str, Any]) -> str | None:
    """Return what meta says of a tensor as torch.fx writes it: `Tensor "f32[2, 3][3, 1]cpu"`."""
    known: Any = meta.get("val")
    if not isinstance(known, torch.Tensor):
        known = meta.get("tensor_meta")
    shape, dtype = getattr(known, "shape", meta.get("shape")), getattr(known, "dtype", meta.get("dtype"))
    if shape is None or dtype is None:
        return None
    stride: Any = getattr(known, "stride", None)
    if callable(stride):
        stride = stride() if known.layout == torch.strided else None
    parts = [str(list(part)) for part in (shape, stride) if part is not None]
    device = str(known.device) if isinstance(known, torch.Tensor) else ""
    return f'Tensor "{_short_dtype(dtype)}{"".join(parts)}{device}"'


def _short_dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.").replace("_", "")
    if dtype is torch.bool:
        return "b8"
    for word, letter in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(word):
            return letter + name.removeprefix(word)
    return name


def format_table(graph: Graph) -> str:
    """Lay out a graph as a table with one row for each node, like the package tabulate in its plain style."""
    rows = [["opcode", "name", "target", "args", "kwargs"]]
    for node in graph.nodes:
        rows.append([str(cell) for cell in (node.op, node.name, node.target, node.args, node.kwargs)])
    cells = [[cell.split("\n") for cell in row] for row in rows]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(rows[0]))]
    # tabulate leaves room for two more characters beside each heading.
    widths = [max(width, len(heading) + 2) for width, heading in zip(widths, rows[0], strict=True)]
    lines: list[str] = []
    for row in cells:
        for index in range(max(len(cell) for cell in row)):
            parts = [
                (cell[index] if index < len(cell) else "").ljust(width) for cell, width in zip(row, widths, strict=True)
            ]
            lines.append("  ".join(parts).rstrip())
        if row is cells[0]:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_target(target: Target) -> str:
    """Name a target as code would: the path itself, `operator.add`, `torch.relu`, `builtins.getattr`."""
    if isinstance(target, str):
        return target
    name = qualified_name(target)
    return f"builtins.{name}" if "." not in name else name


def format_type(annotation: Any) -> str:  # Any: an annotation is a type, a string, a typing construct...
    """Write a type annotation: classes by their qualified name, everything else as Python prints it."""
    if isinstance(annotation, type) and not isinstance(annotation, GenericAlias):
        module = annotation.__module__
        return annotation.__qualname__ if module == "builtins" else f"{module}.{annotation.__qualname__}"
    return repr(annotation)


def _format_argument(argument: Argument) -> str:
    if isinstance(argument, Node):
        return f"%{argument.name}"
    if isinstance(argument, tuple):
        items = [_format_argument(item) for item in cast(tuple[Any, ...], argument)]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(argument, list):
        return f"[{', '.join([_format_argument(item) for item in cast(list[Any], argument)])}]"
    if isinstance(argument, dict):
        items = [f"{key}: {_format_argument(value)}" for key, value in cast(dict[Any, Any], argument).items()]
        return f"{{{', '.join(items)}}}"
    return str(argument)
