"""Draw a roofline: what nodes compute in a second, over their arithmetic intensity."""

from __future__ import annotations

from math import log10
from typing import TYPE_CHECKING, Any

from featx.passes.table_format import clipped, with_prefix
from featx.plotting import new_figure

if TYPE_CHECKING:
    from featx.passes.roofline import Roofline, RooflineNode

_COLOURS = {"memory": "#0072b2", "compute": "#d55e00"}


def draw(roofline: Roofline, top: int) -> Any:  # Any: a matplotlib Figure
    """Return a figure with a disc for each node, its area the time, under the roof of both ceilings.

    Nodes that compute nothing have no place on it; the title says how much time they take.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    placed = [node for node in roofline.nodes if node.operations and node.bytes_moved and node.seconds]
    left = sum(node.share for node in roofline.nodes) - sum(node.share for node in placed)
    figure = new_figure(figsize=(10, 5.5), dpi=120)
    axes, names = figure.subplots(1, 2, width_ratios=(3, 1))
    _draw_roof(axes, roofline, placed)
    for bound, colour in _COLOURS.items():
        nodes = [node for node in placed if node.bound == bound]
        axes.scatter(
            [node.intensity for node in nodes],
            [node.operations_per_second for node in nodes],
            s=[max(2500 * node.share, 6) for node in nodes],
            color=colour,
            alpha=0.45,
            linewidths=0,
            label=f"bound by {bound}, {100 * sum(node.share for node in nodes):.0f} % of the time",
        )
    _name(axes, names, placed[:top])
    axes.set(xscale="log", yscale="log", xlabel="operations for each byte moved", ylabel="operations in a second")
    axes.grid(which="major", color="0.92")
    axes.set_axisbelow(True)
    for handle in axes.legend(loc="lower right", frameon=False).legend_handles:
        handle.set_sizes([60])
    axes.set_title(f"Area: time. Not shown: nodes that compute nothing, {100 * left:.0f} % of the time", fontsize=10)
    return figure


def _draw_roof(axes: Any, roofline: Roofline, placed: list[RooflineNode]) -> None:
    peaks = roofline.peaks
    intensities = [node.intensity for node in placed] or [peaks.ridge]
    low, high = min(*intensities, peaks.ridge) / 2, max(*intensities, peaks.ridge) * 4
    roof = [low * peaks.bytes_per_second, peaks.flops_per_second, peaks.flops_per_second]
    axes.plot([low, peaks.ridge, high], roof, color="0.2", linewidth=1.5)
    flops = with_prefix(peaks.flops_per_second, "FLOP/s")
    axes.annotate(flops, (high, roof[-1]), ha="right", va="bottom", xytext=(0, 3), textcoords="offset points")
    moved = with_prefix(peaks.bytes_per_second, "B/s")
    axes.annotate(moved, (low, roof[0]), ha="left", va="top", xytext=(12, 0), textcoords="offset points")


def _name(axes: Any, names: Any, nodes: list[RooflineNode]) -> None:
    names.set_axis_off()
    names.set_title("longest", fontsize=10, loc="left")
    # Numbers that would lie on each other stand in a row.
    places: dict[tuple[int, int], list[int]] = {}
    for number, node in enumerate(nodes, 1):
        place = (round(10 * log10(node.intensity)), round(6 * log10(node.operations_per_second)))
        places.setdefault(place, []).append(number)
        line = f"{number}  {clipped(node.name, 30)}  {100 * node.share:.1f} %"
        names.text(0, 1 - 0.07 * number, line, transform=names.transAxes, fontsize=8, color=_COLOURS[node.bound])
    for numbers in places.values():
        first = nodes[numbers[0] - 1]
        point = (first.intensity, first.operations_per_second)
        axes.annotate(", ".join(map(str, numbers)), point, ha="center", va="center", fontsize=8)
