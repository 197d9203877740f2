"""The variables of closures, which may have no value yet."""

from __future__ import annotations

from types import CellType
from typing import Any

from featx.rebuilding import NO_VALUE


def contents_of_cell(cell: CellType, default: Any = NO_VALUE) -> Any:
    """Return the value of a variable of a closure, or `default` where it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return default
