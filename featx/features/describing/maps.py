"""Stage: a value that a backbone can return; which values of a traced model are maps or tokens of its image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from featx.features.describing.node_rows import TracedRows
from featx.features.describing.table import NodeInfo
from featx.ir.arguments import nodes_in
from featx.ir.node import Node
from featx.tracing.nodes.module_output import module_output, node_that_made

_PLACES = {"NCHW": (2, 3), "NHWC": (1, 2)}
# Their maps have the same size for each image, so they have no stride.
_OF_FIXED_SIZE = frozenset({"AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"})


@dataclass(frozen=True)
class Stage:
    """A value that a backbone can return.

    Attributes:
        name: under which it can be asked for.
        stride: by how many pixels of the image two neighbours are apart.
        layout: the meaning of its dimensions: NCHW, NHWC or NLC.
        channels: how many.
        depth: how deep in the model the module or operation lies that gives it.
        is_declared: whether its tokens have this stride by what the model declares or its whole graph shows. The
            graph of an extractor, in which modules before it are single calls, may not show it.
        to_map: makes an NHWC map of its tokens, where they are in another order than the places of the image.
    """

    name: str
    stride: int
    layout: str
    channels: int | None = None
    depth: int = 0
    is_declared: bool = False
    to_map: Callable[[torch.Tensor], torch.Tensor] | None = None


def maps_of(row: NodeInfo, traced: TracedRows) -> list[Stage]:
    """Return the map of a row, or those in the tuple or list that a module returns."""
    stage = _stage(row, traced)
    if stage is not None:
        return [stage]
    parts = [
        _stage(traced.by_name[name], traced) for name in names_of_parts(row.name, traced) if name in traced.by_name
    ]
    return [replace(part, depth=row.depth) for part in parts if part is not None]


def names_of_parts(module: str, traced: TracedRows) -> list[str]:
    """Return the names of the values in the tuple or list that a module returns."""
    node = traced.nodes.get(module)
    if node is None or node.target is not module_output or isinstance(node.args[0], Node):
        return []
    return [str(part.meta.get("qualified_name")) for part in nodes_in(node.args[0])]


def all_of(maps: Mapping[str, list[Stage]]) -> list[Stage]:
    """Return the maps of all rows."""
    return [stage for found in maps.values() for stage in found]


def _stage(row: NodeInfo, traced: TracedRows) -> Stage | None:
    if row.kind not in ("module", "operation") or row.shape is None or row.layout is None:
        return None
    if type(row.stride) is not int or row.type in _OF_FIXED_SIZE:
        return None
    if row.layout in _PLACES:
        is_map = all(row.shape[place] > 1 for place in _PLACES[row.layout])
    else:
        is_map = row.layout == "NLC" and row.shape[1] - row.prefix_tokens > 1
    is_declared = row.layout == "NLC" and row.prefix_tokens > 0
    stage = Stage(row.name, row.stride, row.layout, row.channels, row.depth, is_declared)
    # One place may be the map of a small image, or what a head makes of any image.
    return stage if is_map or (row.layout in _PLACES and _grows(stage, traced)) else None


def is_of_image(stage: Stage, traced: TracedRows) -> bool:
    """Say whether a value grows with the image, as far as the model takes larger ones."""
    return traced.other_sizes is None or not traced.other_sizes.wider or _grows(stage, traced)


def _grows(stage: Stage, traced: TracedRows) -> bool:
    """Say whether a value is known to grow with the image, in proportion.

    What a pool of a fixed window leaves of a map has lost most places, and is no map. Convolutions without padding lose
    two at most.
    """
    wider = {} if traced.other_sizes is None else traced.other_sizes.wider
    before, there = node_that_made(traced.nodes[stage.name]).meta.get("shape"), wider.get(stage.name)
    if there is None or before is None:
        return False
    places = _PLACES.get(stage.layout, (1,))
    width = int(before[places[-1]])
    growth = there[places[-1]] - width  # as wide as a map of the whole image
    return len(there) == len(before) and growth > 0.5 * width and growth - width < max(width, 3)


def last_at_each_stride(maps: Iterable[Stage], traced: TracedRows) -> list[Stage]:
    """Return, for each stride in ascending order, the last map of least depth."""
    last: dict[int, Stage] = {}
    for stage in sorted(maps, key=lambda each: traced.nodes[each.name]):
        if stage.stride not in last or stage.depth <= last[stage.stride].depth:
            last[stage.stride] = stage
    return [last[stride] for stride in sorted(last)]
