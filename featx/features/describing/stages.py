"""Stages of a model: the values that a backbone can return, declared by the model or found in its nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from featx.features.describing.images import ImageInput
from featx.features.describing.node_rows import TracedRows
from featx.features.describing.table import NodeInfo
from featx.ir.ancestors import with_ancestors
from featx.ir.arguments import map_arg
from featx.ir.form import sources_of_values
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.paths import parents_of
from featx.libraries import in_order, resolve_feature_module
from featx.tracing.nodes.module_output import module_output

_PLACES = {"NCHW": (2, 3), "NHWC": (1, 2)}
# Their modules are called one by one; "what a list returns" is what the last of them does.
_CONTAINERS = frozenset({"ModuleList", "ModuleDict"})
# What gives the weights of an attention.
_OF_WEIGHTS = frozenset({"Softmax", "Dropout", "Identity", "softmax", "dropout"})
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
            graph of an extractor, in which modules ahead of it are single calls, may not show it.
        to_map: makes an NHWC map of its tokens, where they are in another order than the places of the image.
    """

    name: str
    stride: int
    layout: str
    channels: int | None = None
    depth: int = 0
    is_declared: bool = False
    to_map: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Stages:
    """The stages of a model, the first ones first.

    Attributes:
        all: stages of a pyramid, or blocks that all have the same stride, as in a vision transformer.
        are_blocks: whether they are blocks.
        are_declared: whether the model declares them.
    """

    all: tuple[Stage, ...]
    are_blocks: bool
    are_declared: bool


def stages_of(model: nn.Module, traced: TracedRows, image: ImageInput | None) -> Stages:
    """Return the stages of a model: those that it declares, if it does, else those that its nodes show. O(rows).

    Models of timm declare modules, strides and channels in `feature_info`, and backbones of transformers return their
    `feature_maps`. Else, if the values of the model have several strides, the stage of a stride is the last value of
    it, among those of least depth: `layer2` of a ResNet, and not what the first convolutions of `layer3` give ahead of
    their stride. A container whose modules give all of these strides, such as the `encoder.stages` of a ConvNeXt, has
    the stages. If the values have one stride, stages are the blocks: the longest row of modules of one class, in one
    container, that return the same shape.
    """
    maps = {row.name: found for row in traced.rows if (found := _maps_of(row, traced))}
    found = _feature_maps(model, traced, maps) or _of_timm(model, traced, maps, image)
    are_declared = bool(found)
    if not found:
        computed = _computed(traced.graph, model)
        made = {name: stages for name, stages in maps.items() if traced.nodes[name] in computed}
        made = _without_attention(_without_inner_operations(made, traced), traced)
        of_image = [each for each in _all(made) if _is_of_image(each, traced)]
        found = _in_order(_last_at_each_stride(of_image, traced), traced)
        found = _of_container(found, made, set(of_image), traced)
        found = _behind_blocks(found, made, set(of_image), traced)
        found = _behind_rows_of_blocks(found, made, set(of_image), traced)
        if len(found) < 2:
            found = _blocks(made, set(of_image), traced) or found
    are_blocks = len({stage.stride for stage in found}) < 2 and len(found) > 1
    return Stages(tuple(found), are_blocks, are_declared)


def _maps_of(row: NodeInfo, traced: TracedRows) -> list[Stage]:
    """Return the map of a row, or those in the tuple or list that a module returns."""
    stage = _stage(row)
    if stage is not None:
        return [stage]
    parts = [_stage(traced.by_name[name]) for name in _names_of_parts(row.name, traced) if name in traced.by_name]
    return [replace(part, depth=row.depth) for part in parts if part is not None]


def _names_of_parts(module: str, traced: TracedRows) -> list[str]:
    """Return the names of the values in the tuple or list that a module returns."""
    node = traced.nodes.get(module)
    if node is None or node.target is not module_output or isinstance(node.args[0], Node):
        return []
    return [str(part.meta.get("qualified_name")) for part in _nodes_in(node.args[0])]


def _all(maps: Mapping[str, list[Stage]]) -> list[Stage]:
    return [stage for found in maps.values() for stage in found]


def _stage(row: NodeInfo) -> Stage | None:
    if row.kind not in ("module", "operation") or row.shape is None or row.layout is None:
        return None
    if type(row.stride) is not int or row.type in _OF_FIXED_SIZE:
        return None
    if row.layout in _PLACES:
        is_map = all(row.shape[place] > 1 for place in _PLACES[row.layout])
    else:
        is_map = row.layout == "NLC" and row.shape[1] - row.prefix_tokens > 1
    is_declared = row.layout == "NLC" and row.prefix_tokens > 0
    return Stage(row.name, row.stride, row.layout, row.channels, row.depth, is_declared) if is_map else None


def _nodes_in(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found


def _computed(graph: Graph, model: nn.Module) -> set[Node]:
    """Return the nodes whose values are made of those of the inputs and of weights.

    An image in another dtype is no feature, and neither are register tokens, which know of the image its batch alone.
    """
    weights = {name for name, _ in model.named_parameters()}
    modules = dict(model.named_modules())
    of_inputs, of_weights = set[Node](), set[Node]()
    for node in graph.nodes:
        sources = sources_of_values(node)
        if node.op == "placeholder" or not of_inputs.isdisjoint(sources):
            of_inputs.add(node)
        is_weighted = node.op == "get_attr" and node.target in weights
        if node.op == "call_module":
            is_weighted = next(modules[node.target].parameters(), None) is not None
        if is_weighted or not of_weights.isdisjoint(sources):
            of_weights.add(node)
    return of_inputs & of_weights


def _feature_maps(model: nn.Module, traced: TracedRows, maps: Mapping[str, list[Stage]]) -> list[Stage]:
    """Return what a backbone of transformers returns as `feature_maps`, if the model is one."""
    if not hasattr(model, "out_features") or not hasattr(model, "channels"):
        return []
    for node in traced.graph.nodes:
        if "" in node.meta.get("returned_by", ()) and "feature_maps" in node.kwargs:
            names = [str(each.meta.get("qualified_name")) for each in _nodes_in(node.kwargs["feature_maps"])]
            return [maps[name][0] for name in names] if all(name in maps for name in names) else []
    return []


def _of_timm(
    model: nn.Module, traced: TracedRows, maps: Mapping[str, list[Stage]], image: ImageInput | None
) -> list[Stage]:
    """Return the stages that timm's `feature_info` declares.

    Where it names a module that the model does not have, or that returns something else, stride and channels count.
    """
    declared: object = getattr(model, "feature_info", None)
    try:
        entries = [(entry["module"], entry["reduction"], entry["num_chs"]) for entry in cast(Iterable[Any], declared)]
    except (KeyError, TypeError, AttributeError, IndexError):
        return []
    found: list[Stage] = []
    for name, stride, channels in entries:
        named = maps.get(resolve_feature_module(model, name), [])
        fitting = [each for each in named if each.channels == channels]
        fitting = [each for each in fitting if each.stride == stride] or fitting
        if not fitting and image is not None and type(stride) is int:
            fitting = _tokens_of_stride(model, name, stride, channels, traced, image)
        if not fitting:
            alike = [each for each in _all(maps) if (each.stride, each.channels) == (stride, channels)]
            fitting = _last_at_each_stride([each for each in alike if _is_of_image(each, traced)], traced)
        if not fitting or type(stride) is not int:
            return []
        found.append(replace(fitting[0], stride=stride))
    return found if len({stage.name for stage in found}) == len(found) else []


def _tokens_of_stride(
    model: nn.Module, name: str, stride: int, channels: int, traced: TracedRows, image: ImageInput
) -> list[Stage]:
    """Return the tokens that a module returns, if they are those of as many patches as a declared stride makes.

    CrossViT scales the image for its second branch, so the image has no whole number of its patches, and tokens of
    Hiera are in an order of their own.
    """
    patches = math.prod(size // stride for size in image.sizes)
    rows = [traced.by_name[each] for each in _names_of_parts(name, traced) if each in traced.by_name]
    to_map = in_order(model, name)
    if to_map is not None:
        return [Stage(name, stride, "NLC", channels, traced.by_name[name].depth, to_map=to_map)]
    return [
        Stage(row.name, stride, row.layout, channels, row.depth, is_declared=True)
        for row in rows
        if row.layout == "NLC" and row.channels == channels and row.shape is not None
        and row.shape[1] - patches in (0, 1)
    ]  # fmt: skip


def _without_inner_operations(maps: dict[str, list[Stage]], traced: TracedRows) -> dict[str, list[Stage]]:
    """Leave out what operations give deeper in the model than any module does: padding, and views of windows."""
    depths = {name: traced.by_name[name].depth for name in maps}
    modules = {name for name in maps if traced.by_name[name].kind == "module"}
    outer = min((depths[name] for name in modules), default=math.inf)
    return {name: stages for name, stages in maps.items() if name in modules or depths[name] <= outer}


def _without_attention(maps: dict[str, list[Stage]], traced: TracedRows) -> dict[str, list[Stage]]:
    """Leave out weights of attention, a number for each pair of tokens: they may have the form of a square map."""
    lengths = {row.shape[1] for row in traced.rows if row.shape is not None and len(row.shape) == 3}

    def are_weights(row: NodeInfo) -> bool:
        shape = row.shape
        is_of_pairs = shape is not None and len(shape) == 4 and shape[2] == shape[3] and shape[3] in lengths
        return is_of_pairs and row.type in _OF_WEIGHTS

    return {name: stages for name, stages in maps.items() if not are_weights(traced.by_name[name])}


def _is_of_image(stage: Stage, traced: TracedRows) -> bool:
    """Say whether a value grows with the image, as far as the model takes larger ones."""
    wider = traced.wider()
    before, there = traced.nodes[stage.name].meta.get("shape"), wider.get(stage.name)
    if not wider or there is None or before is None:
        return not wider
    places = _PLACES.get(stage.layout, (1,))
    return len(there) == len(before) and there[places[-1]] > 1.5 * int(before[places[-1]])


def _last_at_each_stride(maps: Iterable[Stage], traced: TracedRows) -> list[Stage]:
    last: dict[int, Stage] = {}
    for stage in sorted(maps, key=lambda each: traced.nodes[each.name]):
        if stage.stride not in last or stage.depth <= last[stage.stride].depth:
            last[stage.stride] = stage
    return [last[stride] for stride in sorted(last)]


def _in_order(stages: list[Stage], traced: TracedRows) -> list[Stage]:
    """Return as many of the stages as the model computes in the order of their strides, of least depth in all.

    So maps of other strides deep inside a stage are left out. Where one stage alone remains, as in a model that scales
    its maps up again, all of them are returned.
    """
    best: list[list[Stage]] = []
    for place, stage in enumerate(stages):
        ahead = [best[other] for other in range(place) if _is_ahead(stages[other], stage, traced)]
        best.append([*max(ahead, key=_goodness, default=[]), stage])
    longest = max(best, key=_goodness, default=[])
    return longest if len(longest) > 1 else stages


def _is_ahead(one: Stage, other: Stage, traced: TracedRows) -> bool:
    return traced.nodes[one.name] < traced.nodes[other.name] and other.stride % one.stride == 0


def _goodness(stages: list[Stage]) -> tuple[int, int]:
    return len(stages), -sum(stage.depth for stage in stages)


def _of_container(
    found: list[Stage], maps: Mapping[str, list[Stage]], of_image: Set[Stage], traced: TracedRows
) -> list[Stage]:
    """Return the stages in the order of their strides; those of `stages.*` or `stages.*.blocks`, where they have most.

    Modules may return several maps, as the stages of Swin: those ahead of their last layer and behind it.
    """
    groups: dict[tuple[str, int], list[Stage]] = {}
    for name, stages in maps.items():
        if traced.by_name[name].kind == "module":
            for pattern in _patterns(name):
                for place, stage in enumerate(stages):
                    if stage in of_image:
                        groups.setdefault((pattern, place), []).append(stage)
    orders = [_in_order(_last_at_each_stride(group, traced), traced) for group in groups.values()]
    joined = [_joined(order, found) for order in orders if len(order) >= (2 if len(found) == 2 else 3)]
    best = max(joined, key=_goodness, default=[])
    return best if len(best) >= max(len(found), 1) else found


def _joined(stages: list[Stage], others: list[Stage]) -> list[Stage]:
    """Return stages with those of smaller and of larger strides from others."""
    of_smaller = [stage for stage in others if stage.stride < stages[0].stride]
    of_larger = [stage for stage in others if stage.stride > stages[-1].stride]
    return [*of_smaller, *stages, *of_larger]


def _patterns(name: str) -> list[str]:
    """Return the name of a module with a star in the place of a number, where it ends in that or in no number."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    if numbers and parts[-1].isdigit():
        numbers = numbers[-1:]
    return [".".join([*parts[:place], "*", *parts[place + 1 :]]) for place in numbers]


def _behind_blocks(
    found: list[Stage], maps: Mapping[str, list[Stage]], of_image: Set[Stage], traced: TracedRows
) -> list[Stage]:
    """Return stages behind the blocks that follow them, where these lie deeper in the model than what comes ahead.

    The encoder of PoolFormer or PVT has `patch_embeddings.0`, `block.0.0`, `block.0.1`, `patch_embeddings.1`, ... The
    last block is not inside of a module that returns another stride, and the next stage is computed from it. Behind
    the last stage come blocks of the same pattern of names as behind the others.
    """
    rows = traced.by_name
    outputs = {
        name: stages[0]
        for name, stages in maps.items()
        if rows[name].kind == "module" and rows[name].type not in _CONTAINERS
    }
    last: list[Stage] = []
    patterns: set[str] = set()
    for place, stage in enumerate(found):
        target = traced.nodes[found[place + 1].name] if place + 1 < len(found) else traced.graph.output_node()
        behind = [
            (name, each)
            for name, each in outputs.items()
            if each in of_image and _has_form_of(each, stage)
            and traced.nodes[stage.name] < traced.nodes[each.name] < target
            and _is_outside_of_other_strides(name, stage, outputs)
        ]  # fmt: skip
        if place + 1 < len(found):
            leading = with_ancestors([target])
            behind = [(name, each) for name, each in behind if traced.nodes[each.name] in leading]
        else:
            behind = [(name, each) for name, each in behind if _without_numbers(name) in patterns]
        name, end = max(behind, key=lambda pair: traced.nodes[pair[1].name], default=("", stage))
        patterns.add(_without_numbers(name))
        last.append(end)
    return last


def _behind_rows_of_blocks(
    found: list[Stage], maps: Mapping[str, list[Stage]], of_image: Set[Stage], traced: TracedRows
) -> list[Stage]:
    """Return stages behind the last blocks of their strides, where blocks of one class are in a row in each stage.

    Each stage of transformers' Swin, `encoder.layers.0`, ends with the patches of the next one. What `blocks.1` in it
    returns is the last map of its stride, and what is ahead of the first stage is none that blocks have computed.
    """
    with_parts = {path for row in traced.rows if row.kind == "module" for path in parents_of(row.name)}
    groups: dict[tuple[str, str], list[Stage]] = {}
    for name, (stage, *_) in maps.items():
        numbers = [part for part in name.split(".") if part.isdigit()]
        is_block = len(numbers) == 2 and name.endswith(f".{numbers[1]}") and name in with_parts
        if is_block and stage in of_image:
            groups.setdefault((_without_numbers(name), traced.by_name[name].type), []).append(stage)
    for group in groups.values():
        last = {stage.stride: stage for stage in _last_at_each_stride(group, traced)}
        behind = [_later(stage, last.get(stage.stride, stage), traced) for stage in found]
        nodes = [traced.nodes[stage.name] for stage in behind]
        if len(last) >= min(3, len(found)) and all(one < other for one, other in itertools.pairwise(nodes)):
            found = behind
    return found


def _later(one: Stage, other: Stage, traced: TracedRows) -> Stage:
    return other if _has_form_of(one, other) and traced.nodes[one.name] < traced.nodes[other.name] else one


def _has_form_of(one: Stage, other: Stage) -> bool:
    return (one.stride, one.channels) == (other.stride, other.channels)


def _is_outside_of_other_strides(name: str, stage: Stage, outputs: Mapping[str, Stage]) -> bool:
    parts = name.split(".")
    around = (".".join(parts[:length]) for length in range(1, len(parts)))
    return all(
        f"{stage.name}.".startswith(f"{path}.") or path not in outputs or outputs[path].stride == stage.stride
        for path in around
    )


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _blocks(maps: Mapping[str, list[Stage]], of_image: Set[Stage], traced: TracedRows) -> list[Stage]:
    """Return the longest row of modules of one class, with numbers for names, that return maps of one shape."""
    groups: dict[tuple[Any, ...], list[Stage]] = {}
    for name, (stage, *_) in maps.items():
        row = traced.by_name[name]
        container, _, last = name.rpartition(".")
        # Blocks have numbers, as `3` and `encoder_layer_3`, and the four projections of an attention have names.
        if row.kind == "module" and last.rpartition("_")[2].isdigit() and stage in of_image:
            shape = traced.by_name[stage.name].shape
            key = (container, row.type, shape, stage.layout, last.isdigit())
            groups.setdefault(key, []).append(stage)
    rows = {key: group for key, group in groups.items() if len(group) > 1}
    # Plain numbers come first; of equal rows the outer one counts.
    best = max(rows, key=lambda key: (key[-1], len(rows[key]), -rows[key][0].depth), default=())
    return rows.get(best, [])
