"""Print a table of nodes: as text, as nested HTML for notebooks, and for rich."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from featx.features.describing.shapes import text_of_shape
from featx.passes.table_format import clipped, format_table, with_prefix

if TYPE_CHECKING:
    from featx.features.describing.table import NodeInfo

_HEADINGS = ("name", "type", "shape", "layout", "stride", "params", "FLOPs")
_MOST_ROWS = 40
_WIDEST_NAME = 60


def text_of(rows: Sequence[NodeInfo], model: str, depth: int | None, *, everything: bool, hint: str | None) -> str:
    """Return the rows of modules down to a depth, or all rows, and a line that says what is left out.

    `hint` says how to see those; by default by the methods of a table.
    """
    shown = list(rows) if everything else _shown(rows, depth)
    table = format_table((*_HEADINGS, "mode"), [(*cells_of(row), _mode(row)) for row in shown], text_columns=4)
    if not rows:
        return f"no node of {model} is in this table"
    left_out = len(rows) - len(shown)
    lines = ["\n".join(line.rstrip() for line in table.splitlines())]
    if left_out:
        lines.append(
            f"{left_out} more of the {len(rows)} nodes of {model} are modules that lie deeper, operations and weights; "
            f"{hint or _hint(rows)}"
        )
    return "\n".join(lines)


def _hint(rows: Sequence[NodeInfo]) -> str:
    around = next((row.name.partition(".")[0] for row in rows if "." in row.name), None)
    by_name = "" if around is None else f", and .filter('{around}.*') what is like that"
    return f".to_text(depth=...) and .to_text(everything=True) show them{by_name}"


def rich_table_of(rows: Sequence[NodeInfo], model: str, depth: int | None, note: str | None = None) -> Any:
    """Return the rows of modules down to a depth as a table of rich, which has to be installed."""
    from rich.table import Table

    table = Table(title=model, title_justify="left", caption=note, caption_justify="left")
    for place, heading in enumerate((*_HEADINGS, "mode")):
        table.add_column(heading, justify="left" if place < 4 else "right", no_wrap=place == 0)
    for row in _shown(rows, depth):
        table.add_row(*cells_of(row), _mode(row))
    return table


def html_of(rows: Sequence[NodeInfo], model: str, note: str | None = None) -> str:
    """Return the rows as HTML in which modules unfold to what is inside them."""
    title = f"<b>{escape(model)}</b>: {len(rows)} nodes ({', '.join(_HEADINGS)})"
    return f"<div>{title}{_nested(rows)}{'' if note is None else escape(note)}</div>"


def cells_of(row: NodeInfo) -> tuple[str, ...]:
    """Return the texts of a row, one for each heading."""
    return (
        clipped(row.name, _WIDEST_NAME),
        row.type,
        text_of_shape(row.shape, row.shapes),
        row.layout or "",
        "" if row.stride is None else _number(row.stride),
        with_prefix(row.parameters) if row.parameters else "",
        with_prefix(row.flops) if row.flops else "",
    )


def _shown(rows: Sequence[NodeInfo], depth: int | None) -> list[NodeInfo]:
    modules = [row for row in rows if row.kind == "module"]
    if not modules:
        return list(rows)
    if depth is None:
        deepest = max(row.depth for row in modules)
        fitting = [each for each in range(1, deepest + 1) if sum(row.depth <= each for row in modules) <= _MOST_ROWS]
        depth = max(fitting, default=min(row.depth for row in modules))
    return [row for row in rows if row.kind == "input" or (row.kind == "module" and row.depth <= depth)]


def _mode(row: NodeInfo) -> str:
    return "" if row.mode == "both" else row.mode


def _number(stride: float | tuple[float, ...]) -> str:
    return "x".join(map(str, stride)) if isinstance(stride, tuple) else str(stride)


def _end_of(names: Sequence[str], start: int) -> int:
    end = start + 1
    while end < len(names) and names[end].startswith(f"{names[start]}."):
        end += 1
    return end


def _nested(rows: Sequence[NodeInfo]) -> str:
    names = [row.name for row in rows]
    parts: list[str] = []
    end = 0
    while end < len(rows):
        start = end
        end = _end_of(names, start)
        line = escape("  ".join(cell for cell in cells_of(rows[start]) if cell))
        style = "font-family:monospace;margin-left:1em"
        if end == start + 1:
            parts.append(f"<div style='{style}'>{line}</div>")
        else:
            inside = _nested(rows[start + 1 : end])
            parts.append(f"<details style='{style}'><summary>{line}</summary>{inside}</details>")
    return "".join(parts)
