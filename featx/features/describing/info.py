"""FeatureInfo: what an extractor returns, with shape, channels, stride and layout, as its trace has seen them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, overload

import torch
from torch import nn

from featx.errors import NodeNameError
from featx.features.describing.images import ImageInput
from featx.features.describing.input_sources import InputSources, images_of_values
from featx.features.describing.known_model import KnownModel
from featx.features.describing.layers_of_maps import has_channels_first
from featx.features.describing.other_sizes import OtherSizes
from featx.features.describing.shapes import forms_of, text_of_shape
from featx.features.describing.strides import is_map, stride_of
from featx.features.describing.tokens import ImageTokens
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.nodes.module_output import node_that_made

_CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding)
_FIRST_OF_MAPS = (
    nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d, nn.Conv3d, nn.BatchNorm3d, nn.AdaptiveAvgPool3d,
)  # fmt: skip


@dataclass(frozen=True)
class FeatureInfo:
    """One value that an extractor returns, for the example that it was traced on.

    Attributes:
        key: its key in the result.
        node: the name under which it was asked for.
        module: the class of the module that returned it; None for an operation.
        shape: its shape; None for what is no tensor, and where there was no example.
        shapes: the shapes of the tensors inside a tuple, a list, a dict or an object, by what takes them out, such as
            `[1][0]` or `.last_hidden_state`; empty for a tensor.
        dtype: its dtype.
        layout: the meaning of its dimensions: N samples, C channels, D, H, W places, L tokens. None if it is not clear.
        channels: the size of C.
        stride: by how many pixels of the input two neighbours are apart, where the input is an image: a number if that
            is the same for all dimensions, else one for each.
        prefix_tokens: how many tokens of L stand for no patch of the image.
        has_class_token: whether the first of those may be a class token. It is not where all are registers.
    """

    key: str
    node: str
    module: str | None
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    layout: str | None
    channels: int | None
    stride: float | tuple[float, ...] | None
    prefix_tokens: int
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict[str, tuple[int, ...]]())
    has_class_token: bool = False


class FeatureInfos(Sequence[FeatureInfo]):
    """What an extractor returns, in the order of its result, with the accessors of timm's `feature_info`."""

    def __init__(self, infos: Sequence[FeatureInfo]) -> None:
        self._infos = tuple(infos)

    def __len__(self) -> int:
        return len(self._infos)

    @overload
    def __getitem__(self, index: int | str) -> FeatureInfo: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[FeatureInfo, ...]: ...
    def __getitem__(self, index: int | str | slice) -> FeatureInfo | tuple[FeatureInfo, ...]:
        """Return the feature at a place, or that of a key of the result."""
        if isinstance(index, str):
            found = next((info for info in self._infos if info.key == index), None)
            if found is None:
                raise NodeNameError(f"there is no feature '{index}'; there are {', '.join(self.keys())}")
            return found
        return self._infos[index]

    def keys(self) -> list[str]:
        """Return the keys of the result."""
        return [info.key for info in self._infos]

    def channels(self, idx: int | Sequence[int] | None = None) -> Any:
        """Return the channels of all features, or of those at these places."""
        return self._values("channels", idx)

    def reduction(self, idx: int | Sequence[int] | None = None) -> Any:
        """Return the strides of all features, or of those at these places."""
        return self._values("stride", idx)

    def module_name(self, idx: int | Sequence[int] | None = None) -> Any:
        """Return the names of all features, or of those at these places."""
        return self._values("node", idx)

    def get_dicts(self) -> list[dict[str, Any]]:
        """Return all that is known as dicts, with timm's names beside those of `FeatureInfo`."""
        return [
            {**asdict(info), "num_chs": info.channels, "reduction": info.stride, "module_name": info.node}
            for info in self._infos
        ]

    def _values(self, name: str, idx: int | Sequence[int] | None) -> Any:
        if isinstance(idx, int):
            return getattr(self._infos[idx], name)
        return [getattr(self._infos[each], name) for each in (range(len(self)) if idx is None else idx)]

    def __repr__(self) -> str:
        titles = ("key", "node", "module", "shape", "layout", "channels", "stride")
        rows = [
            (i.key, i.node, i.module, text_of_shape(i.shape, i.shapes), i.layout, i.channels, i.stride)
            for i in self._infos
        ]
        table = [titles, *[tuple("-" if cell is None else str(cell) for cell in row) for row in rows]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def infos_of(
    requested: Mapping[str, Node],
    names: Mapping[str, str],
    model: KnownModel,
    images: Sequence[ImageInput],
    other_sizes: OtherSizes | None = None,
) -> FeatureInfos:
    """Return what is known of the requested nodes of a traced graph. O(features), and O(nodes) for several images.

    A value is measured against the image from which it is computed, or against the first one where there is none. Of
    several images of different sizes, it has a stride if that is the same against all of them.

    Args:
        requested: the nodes by key.
        names: from the names in the request to keys.
        model: has the modules that are named.
        images: the inputs that are images.
        other_sizes: says which shapes come out for inputs of other sizes. It is asked where a shape fits two layouts,
            such as 64x64x64.
    """
    by_key = {key: name for name, key in names.items()}
    graph = next((node.graph for node in requested.values()), None)
    has_several = graph is not None and len({image.sizes for image in images}) > 1
    sources = images_of_values(graph, images) if graph is not None and has_several else {}

    @functools.cache
    def known_of(image: ImageInput | None) -> _Known:
        return _Known(model, graph, image, None if other_sizes is None else other_sizes.of_image(image))

    infos: list[FeatureInfo] = []
    for key, node in requested.items():
        of_node = sources.get(node) or images[:1] or [None]
        info, *others = [known_of(image).info(key, by_key[key], node) for image in of_node]
        agree = all(other.stride == info.stride for other in others)
        infos.append(info if agree else replace(info, stride=None))
    return FeatureInfos(infos)


class _Known:
    """What is known of a model and its input, to tell what the dimensions of values mean."""

    def __init__(
        self,
        model: KnownModel,
        graph: Graph | None,
        image: ImageInput | None,
        other_sizes: OtherSizes | None,
    ) -> None:
        self._model = model
        self._modules = model.modules
        self._sizes = None if image is None or 0 in image.sizes else image.sizes
        self._batch = None if image is None else image.batch
        self._other_sizes = other_sizes
        has_tokens = bool(self._sizes) and model.tokens_are_in_order
        self._tokens = ImageTokens(model, graph, self._sizes) if self._sizes and has_tokens else None
        self._graph = graph

    def info(self, key: str, name: str, node: Node) -> FeatureInfo:
        module = self._modules.get(name)
        kind = None if module is None else type(module).__name__
        node = node_that_made(node)
        forms = forms_of(node)
        if "" not in forms:
            shapes = {path: shape for path, (shape, _) in forms.items()}
            return FeatureInfo(key, name, kind, None, node.meta.get("dtype"), None, None, None, 0, shapes)
        shape, dtype = forms[""]
        is_of_batch = self._batch in (None, shape[0] if shape else None)
        patches = self._tokens.patches(shape) if self._tokens is not None and is_of_batch else None
        if patches is not None and self._graph is not None and not self._sources.may_be_patches(node, shape[1]):
            patches = None
        has_layout = "has_no_layout" not in node.meta  # attention from tokens to tokens
        layout = self._layout(key, node, shape, module) if has_layout else None
        if layout != "NLC":
            patches = None
        stride = None
        if layout is not None and is_of_batch and self._is_of_image(key, layout, shape, module):
            stride = self._stride(key, layout, shape) if patches is None else patches[0]
        channels = None if layout is None else shape[layout.index("C")]
        prefix_tokens = 0 if patches is None else patches[1]
        has_class_token = self._tokens is not None and prefix_tokens > 0 and self._model.may_have_class_token
        return FeatureInfo(
            key, name, kind, shape, dtype, layout, channels, stride, prefix_tokens, has_class_token=has_class_token
        )

    @functools.cached_property
    def _sources(self) -> InputSources:
        assert self._graph is not None
        return InputSources(self._graph)

    def _is_of_image(self, key: str, layout: str, shape: tuple[int, ...], module: nn.Module | None) -> bool:
        """Say whether the places of a value are those of the image, which a detector resizes, as far as that shows."""
        # Which dimension of a signal has its places is not known: texts come as NLC.
        if self._sizes is None or (layout == "NLC" and len(self._sizes) == 1):
            return False
        is_other = len(layout) != len(self._sizes) + 2 or isinstance(module, _FIRST_OF_MAPS)
        return is_other or is_map(layout, shape, self._sizes) or self._is_wider(key, shape)

    def _stride(self, key: str, layout: str, shape: tuple[int, ...]) -> Any:
        assert self._sizes is not None
        places = tuple(size for size, name in zip(shape, layout, strict=True) if name not in "NC")
        stride = None if self._tokens is None else self._tokens.stride_of_places(places)
        if stride is not None:
            return stride
        return self._model.strides.of(layout, shape, self._sizes, lambda more: self._shape_of_larger(key, more))

    def _layout(self, key: str, node: Node, shape: tuple[int, ...], module: nn.Module | None) -> str | None:
        dims = len(shape)
        if dims < 2 or dims > 5:
            return None
        if dims == 2:
            return "NC"
        places = "DHW"[5 - dims :] if dims > 3 else "L"
        first, last = f"NC{places}", f"N{places}C"
        sizes = self._sizes
        if dims == 3:
            if sizes is not None and len(sizes) == 2:
                return self._layout_of_tokens(key, shape, module)
            found = self._of_sequence(key, shape, module)
            return None if found == "NLC" and self._may_be_length_first else found
        if sizes is None or len(sizes) not in (dims - 2, 2):
            # Frames of a video have maps; heads of the tokens of a signal are none.
            has_maps = isinstance(module, _FIRST_OF_MAPS) or (sizes is not None and len(sizes) == 3)
            return first if has_maps else None
        if isinstance(module, _FIRST_OF_MAPS) or has_channels_first(node, shape, module, self._modules):
            return first
        fits = [
            layout for layout in (first, last) if is_map(layout, shape, sizes) and not self._has_tokens(layout, shape)
        ]
        if not fits:
            return first if self._is_wider(key, shape) else None
        # With a stride for each axis both may fit: (8, 8, 4) as 8 channels of 8 x 4 places, or as 4 channels of 8 x 8.
        is_certain = sum(stride_of(layout, shape, sizes) is not None for layout in (first, last)) == 1
        if is_certain:
            return fits[0]
        if isinstance(module, _CHANNELS_LAST):
            return last
        there = self._shape_of_wider(key)
        if there is not None and len(there) == dims:
            if there[-1] != shape[-1]:
                return first
            if there[-2] != shape[-2]:
                return last
        if all(size == 1 for size in shape[2:]) != all(size == 1 for size in shape[1:-1]):  # one place, of any image
            return first if shape[-1] == 1 else last
        if len(fits) == 1:
            return fits[0]
        declared = self._model.declared_layout
        return declared if declared in (first, last) else None

    def _has_tokens(self, layout: str, shape: tuple[int, ...]) -> bool:
        """Say whether places of a layout are as many as all tokens, of patches and others: 17 beside maps of 4 x 4."""
        if self._tokens is None:
            return False
        sizes = [size for size, name in zip(shape, layout, strict=True) if name not in "NC"]
        found = [self._tokens.patches((shape[0], size, 1)) for size in sizes]
        return any(patches is not None and patches[1] > 0 for patches in found)

    def _is_wider(self, key: str, shape: tuple[int, ...]) -> bool:
        """Say whether the last dimension alone grows with the width of the image."""
        there = self._shape_of_wider(key)
        return there is not None and len(there) == len(shape) and there[:-1] == shape[:-1] and there[-1] > shape[-1]

    def _shape_of_wider(self, key: str) -> tuple[int, ...] | None:
        return None if self._other_sizes is None else self._other_sizes.wider_so_far.get(key)

    def _shape_of_larger(self, key: str, more: tuple[int, ...]) -> tuple[int, ...] | None:
        return None if self._other_sizes is None else self._other_sizes.larger_so_far(more).get(key)

    def _of_sequence(self, key: str, shape: tuple[int, ...], module: nn.Module | None) -> str | None:
        """Return the layout of a value of three dimensions where the input is a text or a signal."""
        other = self._other_sizes
        found = None if other is None else other.layout_of_sequence(key, shape)
        if found is not None:
            return found
        if isinstance(module, _CHANNELS_FIRST):
            return "NCL"
        # A graph for padded texts is one for their values, and takes no other sizes.
        known = None if other is None else other.layout_by_size(shape)
        if known is None and (isinstance(module, _CHANNELS_LAST) or self._has_channels_last(shape, module)):
            return "NLC"
        return known

    @functools.cached_property
    def _may_be_length_first(self) -> bool:
        """Whether layers take the first dimension for the length, as far as the graph does not show that it is turned.

        torch's recurrent layers and attention do by default.
        """
        other = self._other_sizes
        layers = {id(each) for each in self._modules.values() if _is_length_first(each)}
        if not layers or other is None or self._graph is None:
            return False
        calls = [(node, self._modules.get(str(node.target))) for node in self._graph.find_nodes(op="call_module")]
        shapes = [
            node.all_input_nodes[0].meta.get("shape")
            for node, module in calls
            if module is not None and is_torch_layer(type(module)) and node.all_input_nodes
            and any(id(part) in layers for part in module.modules())
        ]  # fmt: skip
        is_turned = any(shape is not None and other.turns(tuple(shape)) for shape in shapes)
        return not is_turned and not any(map(_packs_batch_first, self._graph.nodes))

    def _has_channels_last(self, shape: tuple[int, ...], module: nn.Module | None) -> bool:
        """Say whether layers of a module work on the last dimension of its value, and none is as wide as another one.

        That tells where the model takes one length alone, as the encoder of Whisper does.
        """
        batch = None if self._other_sizes is None else self._other_sizes.batch
        if module is None or shape[0] != batch or shape[1] == batch:
            return False
        widths = {width for layer in module.modules() for width in _widths_of(layer)}
        return shape[2] in widths and shape[1] not in widths

    def _layout_of_tokens(self, key: str, shape: tuple[int, ...], module: nn.Module | None) -> str | None:
        """Return the layout of a value of three dimensions where the input is an image."""
        if self._batch != shape[0] and self._batch == shape[1]:
            return "LNC"
        turned = (shape[0], shape[2], shape[1])
        are_patches = [self._tokens is not None and self._tokens.patches(each) is not None for each in (shape, turned)]
        if are_patches == [True, False]:
            return "NLC"
        # These are not as many as the patches, or there are as many channels as there may be patches.
        there = self._shape_of_wider(key)
        changed = [] if there is None or len(there) != 3 else [dim for dim in range(3) if there[dim] != shape[dim]]
        if len(changed) == 1 and (changed[0] > 0 or shape[1] == self._batch):
            return ("LNC", "NLC", "NCL")[changed[0]]
        if there is None and are_patches == [False, True]:  # as what mixes the patches of images of one size has it
            return "NCL"
        return "NCL" if not are_patches[0] and isinstance(module, _CHANNELS_FIRST) else "NLC"


def _is_length_first(module: nn.Module) -> bool:
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first


def _packs_batch_first(node: Node) -> bool:
    """Say whether a call packs sequences for recurrent layers, which then are in the order that it says."""
    if node.op != "call_function" or getattr(node.target, "__name__", "").lstrip("_") != "pack_padded_sequence":
        return False
    return bool(node.kwargs.get("batch_first", node.args[2] if len(node.args) > 2 else False))


def _widths_of(layer: nn.Module) -> tuple[int, ...]:
    """Return the lengths of the dimension that a layer works on, where it is the last one."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return layer.normalized_shape[-1:] if isinstance(layer, nn.LayerNorm) else ()
