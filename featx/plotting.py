"""Make figures by matplotlib, where it is installed."""

from __future__ import annotations

from typing import Any

from featx.errors import MissingExtraError


def new_figure(**options: Any) -> Any:  # Any: a matplotlib Figure
    """Return an empty figure; `options` are those of matplotlib's Figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'matplotlib is not installed, and plots need it: pip install "featx[plot]"', name="matplotlib"
        ) from error
    return Figure(layout="constrained", **options)
