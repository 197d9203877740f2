"""Stages of a model: the values that a backbone can return, declared by the model or found in its nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import nn

from featx.features.describing.declared_stages import declared_stages
from featx.features.describing.images import ImageInput
from featx.features.describing.maps import Stage, all_of, is_of_image, last_at_each_stride, maps_of
from featx.features.describing.node_rows import TracedRows
from featx.features.describing.side_branches import without_side_branches
from featx.features.describing.table import NodeInfo
from featx.ir.ancestors import with_ancestors
from featx.ir.form import computed_from_inputs, sources_of_values
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.paths import parents_of
from featx.tracing.nodes.module_output import module_output
from featx.tracing.objects.module_parts import has_forward_hooks

# Their modules are called one by one; "what a list returns" is what the last of them does.
_CONTAINERS = frozenset({"ModuleList", "ModuleDict"})
# What gives the weights of an attention.
_OF_WEIGHTS = frozenset({"Softmax", "Dropout", "Identity", "softmax", "dropout"})


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
    it, among those of least depth: `layer2` of a ResNet, and not what the first convolutions of `layer3` give before
    their stride. A container whose modules give all of these strides, such as the `encoder.stages` of a ConvNeXt, has
    the stages, if these values do not all come after its own. If the values have one stride, stages are the blocks:
    the longest row of modules of one class, in one container, that return the same shape.
    """
    maps = {row.name: found for row in traced.rows if (found := maps_of(row, traced))}
    found = declared_stages(model, traced, maps, image)
    are_declared = bool(found)
    if not found:
        computed = _computed(traced.graph, model)
        made = {name: stages for name, stages in maps.items() if traced.nodes[name] in computed}
        made = _without_hooks(made, traced, model)
        made = _without_attention(_without_inner_operations(made, traced), traced)
        made = without_side_branches(made, traced, dict(model.named_modules()))
        of_image = [each for each in all_of(made) if is_of_image(each, traced)]
        found = _in_order(last_at_each_stride(of_image, traced), traced)
        found = _of_container(found, made, set(of_image), traced)
        found = _behind_blocks(found, made, set(of_image), traced)
        found = _behind_rows_of_blocks(found, made, set(of_image), traced)
        if len(found) < 2:
            found = _blocks(made, set(of_image), traced) or found
    are_blocks = len({stage.stride for stage in found}) < 2 and len(found) > 1
    return Stages(tuple(found), are_blocks, are_declared)


def _computed(graph: Graph, model: nn.Module) -> set[Node]:
    """Return the nodes whose values are made of those of the inputs and of weights.

    An image in another dtype is no feature, and neither are register tokens, which know of the image its batch alone.
    """
    weights = {name for name, _ in model.named_parameters()}
    modules = dict(model.named_modules())
    of_weights = set[Node]()
    for node in graph.nodes:
        is_weighted = node.op == "get_attr" and node.target in weights
        if node.op == "call_module":
            is_weighted = next(modules[node.target].parameters(), None) is not None
        if is_weighted or not of_weights.isdisjoint(sources_of_values(node)):
            of_weights.add(node)
    return computed_from_inputs(graph) & of_weights


def _without_hooks(maps: dict[str, list[Stage]], traced: TracedRows, model: nn.Module) -> dict[str, list[Stage]]:
    """Leave out what hooks compute after what their module has returned: copies that they store, means of maps."""
    returned = {path: node for node in traced.graph.nodes for path in node.meta.get("returned_by", ())}
    last: dict[str, Node] = {}
    for path, module in model.named_modules():
        node = returned.get(path) if has_forward_hooks(module) else None
        if node is not None and node.target is module_output:
            last[path] = max(node.all_input_nodes, default=node)

    def is_of_hook(name: str) -> bool:
        around = name.rpartition(".")[0]
        return traced.by_name[name].kind != "module" and around in last and traced.nodes[name] > last[around]

    return {name: stages for name, stages in maps.items() if not is_of_hook(name)}


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

    Modules may return several maps, as the stages of Swin: those before their last layer and after it.
    """
    groups: dict[tuple[str, int], list[Stage]] = {}
    for name, stages in maps.items():
        if traced.by_name[name].kind == "module":
            for pattern in _patterns(name):
                for place, stage in enumerate(stages):
                    if stage in of_image:
                        groups.setdefault((pattern, place), []).append(stage)
    orders = [_in_order(last_at_each_stride(group, traced), traced) for group in groups.values()]
    joined = [_joined(order, found) for order in orders if len(order) >= (2 if len(found) == 2 else 3)]
    best = max(joined, key=_goodness, default=[])
    return best if len(best) >= max(len(found), 1) and not _are_behind(found, best, traced) else found


def _are_behind(stages: list[Stage], others: list[Stage], traced: TracedRows) -> bool:
    """Say whether each of the other stages is followed by an operation of that stride: `self.layers[0](x).relu()`."""
    operations = [stage for stage in stages if traced.by_name[stage.name].kind != "module"]
    places = {stage.stride: traced.nodes[stage.name] for stage in operations}
    return all(other.stride in places and traced.nodes[other.name] <= places[other.stride] for other in others)


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
    """Return stages after the blocks that follow them, where these lie deeper in the model than what comes ahead.

    The encoder of PoolFormer or PVT has `patch_embeddings.0`, `block.0.0`, `block.0.1`, `patch_embeddings.1`, ... The
    last block is not inside of a module that returns another stride, and the next stage is computed from it. After
    the last stage come blocks of the same pattern of names as after the others.
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
    """Return stages after the last blocks of their strides, where blocks of one class are in a row in each stage.

    Each stage of transformers' Swin, `encoder.layers.0`, ends with the patches of the next one. What `blocks.1` in it
    returns is the last map of its stride, and what is before the first stage is none that blocks have computed.
    """
    with_parts = {path for row in traced.rows if row.kind == "module" for path in parents_of(row.name)}
    groups: dict[tuple[str, str], list[Stage]] = {}
    for name, (stage, *_) in maps.items():
        numbers = [part for part in name.split(".") if part.isdigit()]
        is_block = len(numbers) == 2 and name.endswith(f".{numbers[1]}") and name in with_parts
        if is_block and stage in of_image:
            groups.setdefault((_without_numbers(name), traced.by_name[name].type), []).append(stage)
    for group in groups.values():
        last = {stage.stride: stage for stage in last_at_each_stride(group, traced)}
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
