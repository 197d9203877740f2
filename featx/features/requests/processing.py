"""What a Feature does to a value, as nodes of the graph of an extractor."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featx.errors import RequestError
from featx.features.describing.images import ImageInput
from featx.features.describing.info import FeatureInfo
from featx.features.describing.other_sizes import OtherSizes
from featx.features.describing.shapes import shapes_in
from featx.features.requests.feature import MAPS, SEQUENCES, Feature, OwnMask
from featx.features.requests.pooling import generalized_mean, pool_tokens
from featx.ir.ancestors import with_ancestors
from featx.ir.effects import MeasuredEffects
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.runtime_checks import runtime_check
from featx.ir.torch_layers import is_torch_layer
from featx.module import GraphModule
from featx.passes.shapes import ShapeProp
from featx.tracing.guards.guards import add_check
from featx.tracing.replica.replica import Replica
from featx.tree import clone_tensors

# Where the modules are that the user gives for features.
HEADS = "feature_heads"


# What the tokens of a decoder are computed from, in encoder-decoder models of transformers.
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class _Step:
    """A method call, or an index, of the tensor."""

    method: str
    args: tuple[Any, ...] = ()

    def on(self, value: Any) -> Any:
        return value[self.args] if self.method == "[]" else getattr(value, self.method)(*self.args)

    def in_graph(self, graph: Graph, node: Node) -> Node:
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


_Steps = list["_Step | _Unfold | _PoolTokens | _GeneralizedMean"]


def process(
    graph: Graph,
    features: Mapping[str, tuple[Feature, ...]],
    infos: Mapping[str, FeatureInfo],
    image: ImageInput | None,
) -> dict[str, FeatureInfo]:
    """Let `graph`, which returns a dict, do to its values what `features` says by key; return what comes out then.

    `graph` is changed. O(features).

    Raises:
        RequestError: something cannot be done with a value of this layout, or that has none.
    """
    if not features:
        return dict(infos)
    output = graph.output_node()
    found: dict[str, tuple[Node, FeatureInfo]] = {}
    for first, node in dict(output.args[0]).items():
        for feature in features.get(first, (Feature(first),)):
            for key, processed in _processed(graph, node, feature, infos[first], image).items():
                if key in found:
                    raise RequestError(
                        f"the key '{key}' is given twice, once to prefix tokens that are put apart; choose another one"
                    )
                found[key] = processed
    output.args = ({key: value for key, (value, _) in found.items()},)
    return {key: info for key, (_, info) in found.items()}


def refuse_maps_of_scaled_images(
    features: Mapping[str, tuple[Feature, ...]], infos: Iterable[FeatureInfo], other_sizes: OtherSizes
) -> None:
    """Raise where tokens are to become a map, and there are as many for an image of twice the width.

    O(nodes) where there is such a feature.

    Raises:
        RequestError: forward scales or crops the image, so its size tells no height and width of the map.
    """
    for info in infos:
        is_map = any(each.layout in MAPS and each.of_stride is None for each in features.get(info.key, ()))
        there = other_sizes.wider_so_far.get(info.key) if is_map and info.layout == "NLC" else None
        if there is not None and info.shape is not None and there[1] == info.shape[1]:
            raise RequestError(
                f"'{info.node}' has {info.shape[1]} tokens for a wider image too, so they are no map of the places of "
                "the image; take the tokens, without layout"
            )


def _processed(
    graph: Graph, node: Node, feature: Feature, info: FeatureInfo, image: ImageInput | None
) -> dict[str, tuple[Node, FeatureInfo]]:
    key = str(feature.key)
    info = replace(info, key=key)
    if feature.of_stride is not None:
        info = _with_stride(info, feature.of_stride, image)
    if feature.prefix_tokens != "apart" or not info.prefix_tokens:
        return {key: _value_of(graph, node, key, feature, info, image)}
    own = replace(feature, prefix_tokens="drop")
    prefix = f"{key}_prefix"
    return {key: _value_of(graph, node, key, own, info, image), prefix: _prefix_of(graph, node, prefix, feature, info)}


def _value_of(
    graph: Graph, node: Node, key: str, feature: Feature, info: FeatureInfo, image: ImageInput | None
) -> tuple[Node, FeatureInfo]:
    _check_form(feature, info)
    mask = _mask_of_tokens(graph, node, feature, info) if feature.pool is not None else None
    steps, info = _steps(feature, info, image, mask)
    value = node
    for step in steps:  # at once, so that no whole map is kept until the end
        with graph.inserting_before(node.next):
            node = step.in_graph(graph, node)
    if info.shape is None and feature.of_layout is not None:
        with graph.inserting_after(value):
            add_check(graph, check_layout, value, feature.of_layout, info.node)
    with graph.inserting_before(graph.output_node()):  # these may draw random numbers, after the model
        if feature.apply is not None and _may_write(feature.apply):
            node = graph.call_function(clone_tensors, (node,))  # the value may be another feature too
        if isinstance(feature.apply, nn.Module):
            node = graph.call_module(head_path(key), (node,))
        elif feature.apply is not None:
            node = graph.call_function(feature.apply, (node,))
        if feature.dtype is not None:
            node = graph.call_method("to", (node, feature.dtype))
    return node, _after(feature, info)


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


@runtime_check
def check_layout(value: torch.Tensor, layout: str, name: str) -> None:
    """Raise unless the value of the node `name` has as many dimensions as the layout that its Feature says it has.

    Raises:
        RequestError: it has not.
    """
    if value.dim() != len(layout):
        shape = ", ".join([str(size) for size in value.shape])  # as TorchScript can read it
        raise RequestError(f"of_layout='{layout}' has {len(layout)} dimensions, and '{name}' has the shape ({shape})")


def _check_form(feature: Feature, info: FeatureInfo) -> None:
    """Raise RequestError if a value is not of the form that a Feature takes: one tensor, of the rank of its layout."""
    options = ("detach", "pool", "layout", "flatten", *(("dtype",) if feature.apply is None else ()))
    given = [name for name in options if getattr(feature, name)]
    if info.shapes and given:
        number = "one tensor in a tuple or dict" if len(info.shapes) == 1 else f"{len(info.shapes)} tensors"
        raise RequestError(
            f"{' and '.join(given)} in the Feature of '{info.node}' is for a value that is one tensor, and this one "
            f"holds {number}: {', '.join(info.shapes)}. Do all of it in apply, which gets the value as it is, "
            "such as apply=lambda value: value[0].mean(1)"
        )
    if feature.of_layout is not None and info.shape is not None and len(info.shape) != len(feature.of_layout):
        raise RequestError(
            f"of_layout={feature.of_layout!r} has {len(feature.of_layout)} dimensions, and '{info.node}' has the shape "
            f"{info.shape}"
        )


def _may_write(apply: Callable[..., Any] | nn.Module) -> bool:
    """Say whether a function or a module may write its input: all but layers of torch that are not `inplace`."""
    return not isinstance(apply, nn.Module) or any(
        not is_torch_layer(type(each)) or getattr(each, "inplace", False) for each in apply.modules()
    )


def _prefix_of(graph: Graph, node: Node, key: str, feature: Feature, info: FeatureInfo) -> tuple[Node, FeatureInfo]:
    steps: _Steps = [_Step("[]", (slice(None), slice(None, info.prefix_tokens)))]
    steps += [_Step("detach", ())] if feature.detach else []
    steps += [_Step("to", (feature.dtype,))] if feature.dtype is not None else []
    with graph.inserting_before(node.next):
        prefix = node
        for step in steps:
            prefix = step.in_graph(graph, prefix)
    after = _seen_after(steps, replace(info, key=key))
    return prefix, replace(after, stride=None, prefix_tokens=info.prefix_tokens)


def head_path(key: str) -> str:
    """Return where the module of a feature is in an extractor."""
    return f"{HEADS}.{''.join(each if each.isalnum() else '_' for each in key)}"


def modules_of(features: Iterable[Feature]) -> dict[str, nn.Module]:
    """Return the modules that features apply, by key."""
    return {str(each.key): each.apply for each in features if isinstance(each.apply, nn.Module)}


def with_heads(model: nn.Module, heads: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that has the parts of `model`, and `heads`, by key; `model` itself if there are none.

    Raises:
        RequestError: the model has a part of the name that the modules are put under, or two keys give one path.
    """
    if not heads:
        return model
    if hasattr(model, HEADS):
        raise RequestError(f"the model has an attribute '{HEADS}', under which the modules of features are put")
    holder = nn.Module()
    for key, head in heads.items():
        name = head_path(key).rpartition(".")[2]
        if name in holder._modules:
            raise RequestError(f"the key '{key}' and another one give the same name to a module, '{name}'")
        holder.add_module(name, head)
    root = object.__new__(type(model))
    root.__dict__.update(model.__dict__, _modules={**model._modules, HEADS: holder})
    return root


def _mask_of_tokens(graph: Graph, node: Node, feature: Feature, info: FeatureInfo) -> Node | None:
    """Return the input that says which tokens of a text count, if there is one.

    Raises:
        RequestError: the one that is named is no input, or has another shape than the tokens; or none is named, and the
            value is computed with a mask of another shape.
    """
    is_own, layout = isinstance(feature.mask, OwnMask), str(feature.of_layout or info.layout)
    is_sequence = sorted(layout) == ["C", "L", "N"]
    if feature.mask is None or (is_own and not is_sequence):
        return None
    inputs = {str(each.target): each for each in graph.find_nodes(op="placeholder")}
    sources = with_ancestors([node])
    is_of_decoder = is_own and any(inputs.get(name) in sources for name in _DECODER_INPUTS)
    name = f"decoder_{feature.mask}" if is_of_decoder else str(feature.mask)
    mask = inputs.get(name)
    tokens = None if info.shape is None else info.shape[:2]
    if info.shape is not None and is_sequence and len(info.shape) == 3:
        tokens = (info.shape[layout.index("N")], info.shape[layout.index("L")])
    shape = None if mask is None else mask.meta.get("shape")
    if mask is not None and shape is not None and tokens == tuple(shape) and (info.stride is None or not is_own):
        return mask
    if is_own and (shape is None or mask not in sources or info.stride is not None):
        return None
    found = "is no input" if mask is None else f"has the shape {shape}"
    way = "; mask=None counts all tokens, those of padding too" if is_own else ""
    if mask is not None:  # as for sound, of which each token is many samples
        way += ". Where the model computes such a mask, return that node as well, and pool with it"
    raise RequestError(
        f"mask must name an input of the shape {tokens}, one value for each token of '{info.node}'; '{name}' "
        f"{found}{way}"
    )


def _steps(
    feature: Feature, info: FeatureInfo, image: ImageInput | None, mask: Node | None
) -> tuple[_Steps, FeatureInfo]:
    layout = feature.of_layout or info.layout
    if (feature.pool or feature.layout) and info.shape is None and layout == "NLC":
        raise RequestError(
            f"the shape of '{info.node}' is not known, so that it is not known which tokens stand for no patch, or for "
            "padding; give example_inputs with which the model runs"
        )
    steps: _Steps = [_Step("detach")] if feature.detach else []
    if (feature.pool or feature.layout) and layout is None:
        raise RequestError(
            f"'{info.node}' is not known to have places or channels (its shape is "
            f"{'not known' if info.shape is None else info.shape}); {_way_to_layout(info)}"
        )
    if feature.pool is not None and layout != "NC":
        if mask is not None:
            to_tokens = tuple(map(str(layout).index, "NLC")) if len(str(layout)) == 3 else (0, 1, 2)
            steps += [_Step("permute", to_tokens)] if to_tokens != (0, 1, 2) else []
            steps.append(_PoolTokens(feature.pool, mask))
        else:
            steps += _pooled(feature.pool, str(layout), info, image)
        layout = "NC"
    if feature.layout in MAPS and layout == "NLC":
        steps += _to_map(info, image)
        layout = "NCHW"
    elif feature.layout in SEQUENCES and layout in MAPS:
        steps += [_Step("flatten", (2,))] if layout == "NCHW" else [_Step("flatten", (1, 2))]
        layout = "NCL" if layout == "NCHW" else "NLC"
    elif feature.prefix_tokens == "drop" and feature.pool is None:
        steps += _without_prefix(info)
    if feature.layout is not None and layout != feature.layout:
        if sorted(str(layout)) != sorted(feature.layout):
            raise RequestError(f"'{info.node}' is {layout} and cannot be permuted to {feature.layout}")
        steps.append(_Step("permute", tuple(str(layout).index(each) for each in feature.layout)))
        layout = feature.layout
    if feature.flatten:
        steps.append(_Step("flatten", (1,)))
        layout = "NC" if layout == "NC" else None
    return steps, _seen_after(steps, replace(info, layout=layout))


def _way_to_layout(info: FeatureInfo) -> str:
    if info.shape is None:
        return "give example_inputs with which the model runs, and its shape tells"
    layouts = {3: ("NLC", "LNC", "NCL"), 5: ("NCDHW", "NDHWC")}.get(len(info.shape or ()), ("NCHW", "NHWC"))
    return "say in its Feature what it is: " + " or ".join(f"of_layout={layout!r}" for layout in layouts)


def _with_stride(info: FeatureInfo, stride: int, image: ImageInput | None) -> FeatureInfo:
    patches = 0 if image is None else math.prod(size // stride for size in image.sizes)
    if info.layout != "NLC" or info.shape is None or not 0 < patches <= info.shape[1]:
        raise RequestError(
            f"of_stride={stride} is for tokens of patches, and the {info.shape} of '{info.node}' are not as many as "
            f"the {patches} patches of the image"
        )
    return replace(info, stride=stride, prefix_tokens=info.shape[1] - patches)


def _to_map(info: FeatureInfo, image: ImageInput | None) -> _Steps:
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
    return [*_without_prefix(info), _Step("transpose", (1, 2)), unfold]


def _without_prefix(info: FeatureInfo) -> _Steps:
    return [_Step("[]", (slice(None), slice(info.prefix_tokens, None)))] if info.prefix_tokens else []


def _pooled(pool: str, layout: str, info: FeatureInfo, image: ImageInput | None) -> _Steps:
    is_text = layout == "NLC" and image is None
    if pool in ("cls", "last"):
        if not is_text and (pool == "last" or layout != "NLC" or not info.has_class_token):
            kind = "class token" if pool == "cls" else "last token of a text"
            raise RequestError(f"'{info.node}' is {layout} and has no {kind}; take pool='avg'")
        return [_Step("select", (1, 0 if pool == "cls" else -1))]
    steps = _without_prefix(info)
    places = tuple(place for place, name in enumerate(layout) if name not in "NC")
    if pool == "gem":
        return [*steps, _GeneralizedMean(places)]
    return [*steps, _Step("mean" if pool == "avg" else "amax", (places,))]


def _seen_after(steps: _Steps, info: FeatureInfo) -> FeatureInfo:
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


def _after(feature: Feature, info: FeatureInfo) -> FeatureInfo:
    if feature.apply is not None:
        shape, shapes, dtype = _form_after(feature.apply, info)
        info = FeatureInfo(info.key, info.node, info.module, shape, dtype, None, None, None, 0, shapes)
    return info if feature.dtype is None else replace(info, dtype=feature.dtype)


def _form_after(apply: Callable[..., Any], info: FeatureInfo) -> tuple[Any, dict[str, tuple[int, ...]], Any]:
    """Return the shape, the shapes inside and the dtype of what a function gives; nothing where it takes no values.

    It runs on a tensor without values, and a module by a replica.
    """
    if info.shape is None:
        return None, {}, None
    graph = Graph()
    root = nn.Module()
    value = graph.placeholder("value")
    try:
        if isinstance(apply, nn.Module):
            root.add_module("head", Replica(apply, copies_tensors="forms").root)
            graph.output(graph.call_module("head", (value,)))
        else:
            graph.output(graph.call_function(apply, (value,)))
        result = ShapeProp(GraphModule(root, graph)).propagate(torch.empty(info.shape, dtype=info.dtype, device="meta"))
    except Exception as error:  # whatever a function of the user's raises that reads values
        is_of_torch = isinstance(apply, nn.Module) and all(is_torch_layer(type(module)) for module in apply.modules())
        if is_of_torch:
            raise RequestError(f"apply of '{info.node}' fails on a value of shape {info.shape}: {error}") from error
        return None, {}, None
    if isinstance(result, torch.Tensor):
        return tuple(result.shape), {}, result.dtype
    return None, shapes_in(result), None
