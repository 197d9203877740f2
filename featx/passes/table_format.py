"""Lay out figures as tables that people read."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 2) -> str:
    """Return an aligned table; the first `text_columns` columns are text, on the left, the others on the right."""
    widths = [max(len(row[column]) for row in (headings, *rows)) for column in range(len(headings))]
    lines = ["  ".join("-" * width for width in widths)]
    for row in (headings, *rows):
        cells = [
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines[0], lines[1] = lines[1], lines[0]
    return "\n".join(lines)


def with_prefix(value: float, unit: str = "") -> str:
    """Write a number with three or four digits and a decimal prefix: 4.09 G, 1.5 MB, 0."""
    if value == 0:
        return f"0 {unit}".rstrip()
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:#.3g}".rstrip(".") + f" {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def in_seconds(value: float) -> str:
    """Write a time: 1.23 s, 45.6 ms, 789 us."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def clipped(text: str, width: int) -> str:
    """Return `text` with its end left out where it is longer than `width`."""
    return text if len(text) <= width else text[: width - 3] + "..."
