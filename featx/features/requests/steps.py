"""The steps by which a value becomes what a Feature says: pooled, as a map, permuted, flattened."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch

from featx.errors import RequestError
from featx.features.describing.images import ImageInput
from featx.features.describing.info import FeatureInfo
from featx.features.requests.feature import MAPS, SEQUENCES, Feature
from featx.features.requests.pooling import generalized_mean, pool_tokens
from featx.ir.effects import MeasuredEffects
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.runtime_checks import runtime_check
from featx.tracing.guards.guards import add_check


@dataclass(frozen=True)
class Step:
    """A method call of the tensor, or an index of it, which is the method `[]`."""

    method: str
    args: tuple[Any, ...] = ()

    def on(self, value: Any) -> Any:
        """Return what becomes of a value."""
        return value[self.args] if self.method == "[]" else getattr(value, self.method)(*self.args)

    def in_graph(self, graph: Graph, node: Node) -> Node:
        """Return a new node of what becomes of that of `node`."""
        if self.method == "[]":
            return graph.call_function(operator.getitem, (node, self.args))
        return graph.call_method(self.method, (node, *self.args))


@dataclass(frozen=True)
class _Unfold:
    """Make two dimensions, the places of patches of an image, of the last one."""

    sides: tuple[int, int]
    image: ImageInput

    @property
    def counts(self) -> list[int]:
        """How many patches the image of the example has along its height and its width."""
        return [size // side for size, side in zip(self.image.sizes, self.sides, strict=True)]

    def on(self, value: Any) -> Any:
        return value.unflatten(-1, self.counts)

    def in_graph(self, graph: Graph, node: Node) -> Node:
        image = next((each for each in graph.find_nodes(op="placeholder") if each.target == self.image.name), None)
        if image is None:
            raise RequestError(f"tokens become maps by the size of '{self.image.name}', which is no input any more")
        sizes = [graph.call_method("size", (image, place)) for place in (-2, -1)]
        sides = zip(sizes, self.sides, strict=True)
        counts = [graph.call_function(operator.floordiv, (size, side)) for size, side in sides]
        add_check(graph, check_places, node, counts)
        return graph.call_method("unflatten", (node, -1, counts))


@dataclass(frozen=True)
class _PoolTokens:
    """Pool the tokens of a text that a mask, an input of the graph, counts."""

    how: str
    mask: Node

    def on(self, value: Any) -> Any:
        return value[:, 0]

    def in_graph(self, graph: Graph, node: Node) -> Node:
        return _without_effects(graph.call_function(pool_tokens, (node, self.how, self.mask)))


@dataclass(frozen=True)
class _GeneralizedMean:
    """Make one vector of each sample's places."""

    places: tuple[int, ...]

    def on(self, value: Any) -> Any:
        return value.mean(self.places)

    def in_graph(self, graph: Graph, node: Node) -> Node:
        return _without_effects(graph.call_function(generalized_mean, (node, list(self.places))))


def _without_effects(node: Node) -> Node:
    """Note that a call of a function writes nothing, and return it."""
    node.meta["effects"] = MeasuredEffects()
    return node


@runtime_check
def check_places(tokens: torch.Tensor, counts: list[int]) -> None:
    """Raise unless there is a token, in the last dimension, for each place of a map of this height and width.

    Raises:
        RequestError: there is none, as where forward pads, crops or scales the image.
    """
    if tokens.shape[-1] != counts[0] * counts[1]:
        raise RequestError(
            f"the {tokens.shape[-1]} tokens of patches are no map of {counts[0]} by {counts[1]} places, which the size "
            "of the image would make; take the tokens, without layout"
        )


# The steps that make of a tensor what a Feature says, in order.
Steps = list["Step | _Unfold | _PoolTokens | _GeneralizedMean"]


def steps_of(
    feature: Feature, info: FeatureInfo, image: ImageInput | None, mask: Node | None
) -> tuple[Steps, FeatureInfo]:
    """Return the steps by which a value becomes what a Feature says, and what is known of it then.

    Args:
        feature: says what is done.
        info: what is known of the value.
        image: the input that the value follows from, if that is an image.
        mask: the input that says which tokens of a text count, if there is one.

    Raises:
        RequestError: something cannot be done with a value of this layout, or that has none.
    """
    layout = feature.of_layout or info.layout
    if (feature.pool or feature.layout) and info.shape is None and layout == "NLC":
        raise RequestError(
            f"the shape of '{info.node}' is not known, so that it is not known which tokens stand for no patch, or for "
            "padding; give example_inputs with which the model runs"
        )
    steps: Steps = [Step("detach")] if feature.detach else []
    if (feature.pool or feature.layout) and layout is None:
        raise RequestError(
            f"'{info.node}' is not known to have places or channels (its shape is "
            f"{'not known' if info.shape is None else info.shape}); {_way_to_layout(info)}"
        )
    if feature.pool is not None and layout != "NC":
        if mask is not None:
            to_tokens = tuple(map(str(layout).index, "NLC")) if len(str(layout)) == 3 else (0, 1, 2)
            steps += [Step("permute", to_tokens)] if to_tokens != (0, 1, 2) else []
            steps.append(_PoolTokens(feature.pool, mask))
        else:
            steps += _pooled(feature.pool, str(layout), info, image)
        layout = "NC"
    if feature.layout in MAPS and layout == "NLC":
        steps += _to_map(info, image)
        layout = "NCHW"
    elif feature.layout in SEQUENCES and layout in MAPS:
        steps += [Step("flatten", (2,))] if layout == "NCHW" else [Step("flatten", (1, 2))]
        layout = "NCL" if layout == "NCHW" else "NLC"
    elif feature.prefix_tokens == "drop" and feature.pool is None:
        steps += _without_prefix(info)
    if feature.layout is not None and layout != feature.layout:
        if sorted(str(layout)) != sorted(feature.layout):
            raise RequestError(f"'{info.node}' is {layout} and cannot be permuted to {feature.layout}")
        steps.append(Step("permute", tuple(str(layout).index(each) for each in feature.layout)))
        layout = feature.layout
    if feature.flatten:
        steps.append(Step("flatten", (1,)))
        layout = "NC" if layout == "NC" else None
    return steps, seen_after(steps, replace(info, layout=layout))


def _way_to_layout(info: FeatureInfo) -> str:
    if info.shape is None:
        return "give example_inputs with which the model runs, and its shape tells"
    layouts = {3: ("NLC", "LNC", "NCL"), 5: ("NCDHW", "NDHWC")}.get(len(info.shape or ()), ("NCHW", "NHWC"))
    return "say in its Feature what it is: " + " or ".join(f"of_layout={layout!r}" for layout in layouts)


def with_stride(info: FeatureInfo, stride: int, image: ImageInput | None) -> FeatureInfo:
    """Return what is known of tokens of which the last ones stand for patches of this stride.

    Raises:
        RequestError: the value has no tokens, or fewer than the image has such patches.
    """
    patches = 0 if image is None else math.prod(size // stride for size in image.sizes)
    if info.layout != "NLC" or info.shape is None or not 0 < patches <= info.shape[1]:
        raise RequestError(
            f"of_stride={stride} is for tokens of patches, and the {info.shape} of '{info.node}' are not as many as "
            f"the {patches} patches of the image"
        )
    return replace(info, stride=stride, prefix_tokens=info.shape[1] - patches)


def _to_map(info: FeatureInfo, image: ImageInput | None) -> Steps:
    sides = (info.stride, info.stride) if type(info.stride) is int else info.stride
    if image is None or image.name is None or not isinstance(sides, tuple) or len(image.sizes) != 2:
        raise RequestError(
            f"the {info.shape} of '{info.node}' are not known to be patches of an image, so they are no map"
        )
    unfold = _Unfold((int(sides[0]), int(sides[1])), image)
    assert info.shape is not None
    if math.prod(unfold.counts) != info.shape[1] - info.prefix_tokens:  # patches that overlap
        raise RequestError(
            f"the {info.shape} of '{info.node}' are patches with a stride of {info.stride} that do not lie side by "
            "side, so how many lie beside one another is not known for other images; take apply, with unflatten"
        )
    return [*_without_prefix(info), Step("transpose", (1, 2)), unfold]


def _without_prefix(info: FeatureInfo) -> Steps:
    return [Step("[]", (slice(None), slice(info.prefix_tokens, None)))] if info.prefix_tokens else []


def _pooled(pool: str, layout: str, info: FeatureInfo, image: ImageInput | None) -> Steps:
    is_text = layout == "NLC" and image is None
    if pool in ("cls", "last"):
        if not is_text and (pool == "last" or layout != "NLC" or not info.has_class_token):
            kind = "class token" if pool == "cls" else "last token of a text"
            raise RequestError(f"'{info.node}' is {layout} and has no {kind}; take pool='avg'")
        return [Step("select", (1, 0 if pool == "cls" else -1))]
    steps = _without_prefix(info)
    places = tuple(place for place, name in enumerate(layout) if name not in "NC")
    if pool == "gem":
        return [*steps, _GeneralizedMean(places)]
    return [*steps, Step("mean" if pool == "avg" else "amax", (places,))]


def seen_after(steps: Steps, info: FeatureInfo) -> FeatureInfo:
    """Return what is known of a value after these steps; `info` has its layout then, and its form before them."""
    if info.shape is None:
        return info
    if not steps:  # `of_layout` may tell what nothing else does
        return info if info.layout is None else replace(info, channels=info.shape[info.layout.index("C")])
    value = torch.empty(info.shape, dtype=info.dtype, device="meta")
    for step in steps:
        value = step.on(value)
    shape, layout = tuple(value.shape), info.layout
    channels = shape[layout.index("C")] if layout is not None else None
    has_places = layout is not None and layout != "NC"
    has_prefix = layout in SEQUENCES and shape[layout.index("L")] == info.shape[1]
    return replace(
        info, shape=shape, dtype=value.dtype, channels=channels, stride=info.stride if has_places else None,
        prefix_tokens=info.prefix_tokens if has_prefix else 0,
    )  # fmt: skip
