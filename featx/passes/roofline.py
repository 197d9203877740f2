"""roofline: which ceiling of a device holds each node back, its arithmetic or its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from featx.errors import ArgumentTypeError
from featx.passes.cost_report import CostReport
from featx.passes.profile_report import ProfileReport
from featx.passes.table_format import format_table, in_seconds, with_prefix


@dataclass(frozen=True)
class Peaks:
    """The ceilings of a device: the most operations and bytes of memory traffic in a second.

    Raises:
        ArgumentTypeError: one of them is not above 0.
    """

    flops_per_second: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (self.flops_per_second > 0 and self.bytes_per_second > 0):
            raise ArgumentTypeError(
                f"ceilings must be above 0, got {self.flops_per_second} operations and {self.bytes_per_second} bytes "
                "in a second; measure_peaks() measures them"
            )

    @property
    def ridge(self) -> float:
        """The arithmetic intensity, in operations for each byte, from which on arithmetic is the limit."""
        return self.flops_per_second / self.bytes_per_second


@dataclass(frozen=True)
class RooflineNode:
    """One node under the roof.

    Attributes:
        name: of the node.
        path: of the module that it belongs to.
        seconds: the measured time, and `share` that of the sum of all nodes.
        operations: FLOPs and element-wise operations.
        bytes_moved: what it reads and writes, in bytes.
        bound: the ceiling that it would reach first: "compute" or "memory", or "none" for what does neither (views).
        attained: the least time that the ceilings allow, as a share of the measured time. Above 1 where values stay in
            caches or the ceilings are too low.
    """

    name: str
    path: str
    seconds: float
    share: float
    operations: int
    bytes_moved: int
    bound: str
    attained: float

    @property
    def intensity(self) -> float:
        """Operations for each byte that is moved; 0 where nothing is."""
        return self.operations / self.bytes_moved if self.bytes_moved else 0.0

    @property
    def operations_per_second(self) -> float:
        """What it computes in a second."""
        return self.operations / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_second(self) -> float:
        """What it reads and writes in a second."""
        return self.bytes_moved / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Roofline:
    """The nodes of a graph, those that take longest first, and the ceilings that they were held against."""

    nodes: tuple[RooflineNode, ...]
    peaks: Peaks

    def table(self, top: int | None = None) -> str:
        """Return a table of all nodes, or of the `top` that take longest."""
        rows = [
            (
                node.name,
                node.bound,
                in_seconds(node.seconds),
                f"{100 * node.share:.1f} %",
                with_prefix(node.operations),
                with_prefix(node.bytes_moved, "B"),
                f"{node.intensity:.3g}",
                with_prefix(node.operations_per_second, "FLOP/s"),
                with_prefix(node.bytes_per_second, "B/s"),
                f"{100 * node.attained:.0f} %",
            )
            for node in self.nodes[:top]
        ]
        headings = (
            "node",
            "bound",
            "time",
            "share",
            "operations",
            "moved",
            "FLOP/B",
            "computes",
            "moves",
            "of ceiling",
        )
        return format_table(headings, rows)

    def plot(self, path: str | PathLike[str] | None = None, top: int = 12) -> Any:  # Any: a matplotlib Figure
        """Draw the nodes under the roof, the `top` of them with their names, and write that to `path` if it is given.

        Returns the `matplotlib.figure.Figure`.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from featx.passes.roofline_plot import draw

        figure = draw(self, top)
        if path is not None:
            figure.savefig(path)
        return figure

    def __str__(self) -> str:
        shares = {bound: sum(node.share for node in self.nodes if node.bound == bound) for bound in _BOUNDS}
        bounds = [f"{100 * share:.0f} % in nodes bound by {bound}" for bound, share in shares.items() if share]
        return (
            f"{self.table(top=20)}\n\nceilings: {with_prefix(self.peaks.flops_per_second, 'FLOP/s')} and "
            f"{with_prefix(self.peaks.bytes_per_second, 'B/s')}, equal at {self.peaks.ridge:.3g} FLOP/B; of the time, "
            f"{', '.join(bounds) or 'nothing is measured'}"
        )


_BOUNDS = ("compute", "memory", "none")


def roofline(profile: ProfileReport, cost: CostReport, peaks: Peaks) -> Roofline:
    """Hold the measured times of nodes against what they compute and move, and that against the ceilings of a device.

    `profile` and `cost` are of one graph, with inputs of one form. O(nodes * log(nodes)).

    Raises:
        ArgumentTypeError: they are of different graphs.
    """
    costs = {node.name: node for node in cost.nodes}
    found: list[RooflineNode] = []
    for node in profile.nodes:
        known = costs.get(node.name)
        if known is None or len(costs) != len(profile.nodes):
            raise ArgumentTypeError(
                f"profile and cost are of different graphs: the one has {len(profile.nodes)} nodes, '{node.name}' "
                f"among them, the other {len(costs)}; make both of the same module"
            )
        computing = known.operations / peaks.flops_per_second
        moving = known.bytes_moved / peaks.bytes_per_second
        least = max(computing, moving)
        bound = "none" if not least else "compute" if computing >= moving else "memory"
        attained = least / node.seconds if node.seconds else 0.0
        found.append(
            RooflineNode(
                node.name, node.path, node.seconds, node.share, known.operations, known.bytes_moved, bound, attained
            )
        )
    return Roofline(tuple(sorted(found, key=lambda node: -node.seconds)), peaks)


def measure_peaks(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seconds: float = 1.0
) -> Peaks:
    """Measure the ceilings of a device: with matrix products (and, on a CPU, a convolution), and with a copy of memory
    that no cache holds.

    The best of as many runs as fit into about `seconds`, half of them for each. Takes at most 0.8 GiB there. They are
    what torch reaches on this device now, with its present number of threads, which is less than what makers print.
    """
    device = torch.device(device)
    return Peaks(_best_product(device, dtype, seconds / 2), _best_copy(device, seconds / 2))


def _best_product(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    if device.type != "cpu":
        return _product(8192, device, dtype, seconds)
    # Matrix products and convolutions come from different libraries there, of which either may be the faster.
    image = torch.ones(1, 256, 32, 32, device=device, dtype=dtype)
    filters = torch.ones(256, 256, 3, 3, device=device, dtype=dtype)
    flops = 2 * image.numel() * 256 * 9
    convolving = flops / _least_time(lambda: torch.conv2d(image, filters, padding=1), device, seconds / 3)
    return max(convolving, *[_product(size, device, dtype, seconds / 3) for size in (256, 1024)])


def _product(size: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    product = torch.empty_like(matrix)
    return 2 * size**3 / _least_time(lambda: torch.mm(matrix, matrix, out=product), device, seconds)


def _best_copy(device: torch.device, seconds: float) -> float:
    source = torch.ones((64 if device.type == "cpu" else 256) * 2**20, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / _least_time(lambda: target.copy_(source), device, seconds)


def _least_time(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    least, end = float("inf"), float("inf")
    with torch.no_grad():
        run()  # loads what it needs
        if module is not None:
            module.synchronize()
        while least == float("inf") or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            if module is not None:
                module.synchronize()
            now = time.perf_counter()
            least = min(least, now - start)
            end = min(end, start + seconds)
    return least
