"""Stages that a model declares: timm's `feature_info`, and the `feature_maps` of transformers' backbones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import nn

from featx.errors import RequestError
from featx.features.describing.images import ImageInput
from featx.features.describing.maps import Stage, all_of, is_of_image, last_at_each_stride, names_of_parts
from featx.features.describing.node_rows import TracedRows
from featx.ir.arguments import nodes_in
from featx.libraries import in_order, resolve_feature_module


def declared_stages(
    model: nn.Module, traced: TracedRows, maps: Mapping[str, list[Stage]], image: ImageInput | None
) -> list[Stage]:
    """Return the stages that a model declares, the first ones first; none where it declares none. O(rows).

    Args:
        model: the model.
        traced: its rows.
        maps: the maps of each row, by name.
        image: the input that is an image.
    """
    return _feature_maps(model, traced, maps) or _of_timm(model, traced, maps, image)


def _feature_maps(model: nn.Module, traced: TracedRows, maps: Mapping[str, list[Stage]]) -> list[Stage]:
    """Return what a backbone of transformers returns as `feature_maps`, if the model is one.

    Raises:
        RequestError: one of these has another stride by height than by width.
    """
    if not hasattr(model, "out_features") or not hasattr(model, "channels"):
        return []
    for node in traced.graph.nodes:
        if "" in node.meta.get("returned_by", ()) and "feature_maps" in node.kwargs:
            names = [str(each.meta.get("qualified_name")) for each in nodes_in(node.kwargs["feature_maps"])]
            _check_strides(model, names, traced)
            return [maps[name][0] for name in names] if all(name in maps for name in names) else []
    return []


def _check_strides(model: nn.Module, names: list[str], traced: TracedRows) -> None:
    for row in (traced.by_name[name] for name in names if name in traced.by_name):
        if isinstance(row.stride, tuple):
            raise RequestError(
                f"the feature_maps of {type(model).__name__} are no stages of a backbone, with one stride in "
                f"both directions: that of {row.name!r} is {row.stride}. To get them, use "
                f"create_feature_extractor(model, {names})"
            )


def _of_timm(
    model: nn.Module, traced: TracedRows, maps: Mapping[str, list[Stage]], image: ImageInput | None
) -> list[Stage]:
    """Return the stages that timm's `feature_info` declares, each with its stride, or the measured one if that misfits.

    timm declares a stride of 2 for the first map of TResNet, which folds 4 x 4 pixels into channels. Where it names a
    module that the model does not have, or that returns something else, stride and channels count.
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
            alike = [each for each in all_of(maps) if (each.stride, each.channels) == (stride, channels)]
            fitting = last_at_each_stride([each for each in alike if is_of_image(each, traced)], traced)
        if not fitting or type(stride) is not int:
            return []
        fits = image is None or _has_stride(fitting[0], stride, traced, image)
        found.append(replace(fitting[0], stride=stride) if fits else fitting[0])
    return found if len({stage.name for stage in found}) == len(found) else []


def _has_stride(stage: Stage, stride: int, traced: TracedRows, image: ImageInput) -> bool:
    """Say whether a stride makes so many places of the image, as one of 64 pixels makes 4 x 4 of 224 x 224."""
    row = traced.by_name[stage.name]
    values = math.prod(row.shape or ()) // ((row.shape or (1,))[0] * (row.channels or 1))
    if stage.layout == "NLC":
        values -= row.prefix_tokens
    sides = [(size // stride, -(-size // stride)) for size in image.sizes]
    return values in map(math.prod, zip(*sides, strict=True))


def _tokens_of_stride(
    model: nn.Module, name: str, stride: int, channels: int, traced: TracedRows, image: ImageInput
) -> list[Stage]:
    """Return the tokens that a module returns, if they are those of as many patches as a declared stride makes.

    CrossViT scales the image for its second branch, so the image has no whole number of its patches, and tokens of
    Hiera are in an order of their own.
    """
    patches = math.prod(size // stride for size in image.sizes)
    rows = [traced.by_name[each] for each in names_of_parts(name, traced) if each in traced.by_name]
    to_map = in_order(model, name)
    if to_map is not None:
        return [Stage(name, stride, "NLC", channels, traced.by_name[name].depth, to_map=to_map)]
    return [
        Stage(row.name, stride, row.layout, channels, row.depth, is_declared=True)
        for row in rows
        if row.layout == "NLC" and row.channels == channels and row.shape is not None
        and row.shape[1] - patches in (0, 1)
    ]  # fmt: skip
