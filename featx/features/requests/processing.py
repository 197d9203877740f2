"""What a Feature does to a value, as nodes of the graph of an extractor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from featx.errors import RequestError
from featx.features.describing.images import ImageInput
from featx.features.describing.info import FeatureInfo
from featx.features.describing.other_sizes import OtherSizes
from featx.features.describing.shapes import forms_of
from featx.features.requests.feature import MAPS, Feature, OwnMask
from featx.features.requests.heads import form_after, head_path, may_write
from featx.features.requests.steps import Step, Steps, seen_after, steps_of, with_stride
from featx.ir.ancestors import with_ancestors
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.runtime_checks import runtime_check
from featx.tracing.guards.guards import add_check
from featx.tree import clone_tensors

# What the tokens of a decoder are computed from, in encoder-decoder models of transformers.
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")


def process(
    graph: Graph,
    features: Mapping[str, tuple[Feature, ...]],
    infos: Mapping[str, FeatureInfo],
    image: ImageInput | None,
    names_of_items: Callable[[str], Mapping[str, str]],
) -> dict[str, FeatureInfo]:
    """Let `graph`, which returns a dict, do to its values what `features` says by key; return what comes out then.

    `graph` is changed. O(features). `names_of_items` gives the names of the tensors inside the value of a node, by what
    takes them out, for an error.

    Raises:
        RequestError: something cannot be done with a value of this layout, or that has none.
    """
    if not features:
        return dict(infos)
    output = graph.output_node()
    found: dict[str, tuple[Node, FeatureInfo]] = {}
    has_shapes = any(forms_of(node) for node in graph.nodes)
    for first, node in dict(output.args[0]).items():
        info = infos[first]
        own_image = _image_of(node, info, image)
        for feature in features.get(first, (Feature(first),)):
            _check_form(feature, info, names_of_items, has_shapes=has_shapes)
            for key, processed in _processed(graph, node, feature, info, own_image).items():
                if key in found:
                    raise RequestError(
                        f"the key '{key}' is given twice, once to prefix tokens that are put apart; choose another one"
                    )
                found[key] = processed
    output.args = ({key: value for key, (value, _) in found.items()},)
    return {key: info for key, (_, info) in found.items()}


def _image_of(node: Node, info: FeatureInfo, image: ImageInput | None) -> ImageInput | None:
    """Return the image, unless a value is one of a text beside it: it has other tokens, or does not follow from it."""
    if image is None or image.name is None:
        return image
    sources = [each for each in with_ancestors([node]) if each.op == "placeholder"]
    tokens = None if info.shape is None or info.stride is not None else info.shape[:2]
    known = [each.meta for each in sources if "shape" in each.meta]
    is_of_text = any(tokens == tuple(each["shape"]) and not each["dtype"].is_floating_point for each in known)
    return image if not is_of_text and any(each.target == image.name for each in sources) else None


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
        info = with_stride(info, feature.of_stride, image)
    if feature.prefix_tokens != "apart" or not info.prefix_tokens:
        return {key: _value_of(graph, node, key, feature, info, image)}
    own = replace(feature, prefix_tokens="drop")
    prefix = f"{key}_prefix"
    return {key: _value_of(graph, node, key, own, info, image), prefix: _prefix_of(graph, node, prefix, feature, info)}


def _value_of(
    graph: Graph, node: Node, key: str, feature: Feature, info: FeatureInfo, image: ImageInput | None
) -> tuple[Node, FeatureInfo]:
    mask = _mask_of_tokens(graph, node, feature, info) if feature.pool is not None else None
    steps, info = steps_of(feature, info, image, mask)
    value = node
    for step in steps:  # at once, so that no whole map is kept until the end
        with graph.inserting_before(node.next):
            node = step.in_graph(graph, node)
    if info.shape is None and feature.of_layout is not None:
        with graph.inserting_after(value):
            add_check(graph, check_layout, value, feature.of_layout, info.node)
    with graph.inserting_before(graph.output_node()):  # these may draw random numbers, after the model
        if feature.apply is not None and may_write(feature.apply):
            node = graph.call_function(clone_tensors, (node,))  # the value may be another feature too
        if isinstance(feature.apply, nn.Module):
            node = graph.call_module(head_path(key), (node,))
        elif feature.apply is not None:
            node = graph.call_function(feature.apply, (node,))
        if feature.dtype is not None:
            node = graph.call_method("to", (node, feature.dtype))
    return node, _after(feature, info)


@runtime_check
def check_layout(value: torch.Tensor, layout: str, name: str) -> None:
    """Raise unless the value of the node `name` has as many dimensions as the layout that its Feature says it has.

    Raises:
        RequestError: it has not.
    """
    if value.dim() != len(layout):
        shape = ", ".join([str(size) for size in value.shape])  # as TorchScript can read it
        raise RequestError(f"of_layout='{layout}' has {len(layout)} dimensions, and '{name}' has the shape ({shape})")


def _check_form(
    feature: Feature, info: FeatureInfo, names_of_items: Callable[[str], Mapping[str, str]], *, has_shapes: bool
) -> None:
    """Raise RequestError if a value is not of the form that a Feature takes: one tensor, of the rank of its layout.

    `has_shapes` says whether the trace has seen the shapes of values.
    """
    options = ("detach", "pool", "layout", "flatten", *(("dtype",) if feature.apply is None else ()))
    given = [name for name in options if getattr(feature, name)]
    if info.shapes and given:
        number = "one tensor in a tuple or dict" if len(info.shapes) == 1 else f"{len(info.shapes)} tensors"
        names = names_of_items(info.node)
        known = [f"{path} is '{names[path]}'" for path in info.shapes if path in names]
        node = f"one of these nodes: {', '.join(known[:3])};" if known else "the node inside that is this tensor,"
        raise RequestError(
            f"{' and '.join(given)} in the Feature of '{info.node}' is for a value that is one tensor, and this one "
            f"holds {number}: {', '.join(info.shapes)}. Ask for {node} or do all of it in apply, which gets the value "
            f"as it is{_mean_in_apply(*next(iter(info.shapes.items())))}"
        )
    if given and info.shape is None and feature.of_layout is None and has_shapes:
        raise RequestError(
            f"{' and '.join(given)} in the Feature of '{info.node}' is for a value that is one tensor, and this one is "
            "not known to hold any. Ask for a node that is the tensor, or do all of it in apply, which gets the value "
            "as it is"
        )
    if feature.of_layout is not None and info.shape is not None and len(info.shape) != len(feature.of_layout):
        raise RequestError(
            f"of_layout={feature.of_layout!r} has {len(feature.of_layout)} dimensions, and '{info.node}' has the shape "
            f"{info.shape}"
        )


def _mean_in_apply(path: str, shape: tuple[int, ...]) -> str:
    """Return how an `apply` takes the mean over the places of a tensor inside a value, or over its tokens."""
    if len(shape) == 4:
        return f": apply=lambda value: value{path}.mean((2, 3)) for a map with its channels first"
    return f" and counts padding too: apply=lambda value: value{path}.mean(1)"


def _prefix_of(graph: Graph, node: Node, key: str, feature: Feature, info: FeatureInfo) -> tuple[Node, FeatureInfo]:
    steps: Steps = [Step("[]", (slice(None), slice(None, info.prefix_tokens)))]
    steps += [Step("detach", ())] if feature.detach else []
    steps += [Step("to", (feature.dtype,))] if feature.dtype is not None else []
    with graph.inserting_before(node.next):
        prefix = node
        for step in steps:
            prefix = step.in_graph(graph, prefix)
    after = seen_after(steps, replace(info, key=key))
    return prefix, replace(after, stride=None, prefix_tokens=info.prefix_tokens)


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


def _after(feature: Feature, info: FeatureInfo) -> FeatureInfo:
    if feature.apply is not None:
        shape, shapes, dtype = form_after(feature.apply, info)
        info = FeatureInfo(info.key, info.node, info.module, shape, dtype, None, None, None, 0, shapes)
    return info if feature.dtype is None else replace(info, dtype=feature.dtype)
