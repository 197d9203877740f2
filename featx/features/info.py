"""FeatureInfo: what an extractor returns, with shape, channels, stride and layout, as its trace has seen them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import torch
from torch import nn

from featx.ir.node import Node

# What models call the parameter that is their class token.
_CLASS_TOKENS = frozenset({"cls_token", "class_token", "class_embedding"})
_LOST_AT_EDGES = 0.2
_CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding)


@dataclass(frozen=True)
class FeatureInfo:
    """One value that an extractor returns, for the example that it was traced on.

    Attributes:
        key: its key in the result.
        node: the name under which it was asked for.
        module: the class of the module that returned it; None for an operation.
        shape: its shape; None for what is no tensor, and where there was no example.
        dtype: its dtype.
        layout: the meaning of its dimensions: N samples, C channels, D, H, W places, L tokens. None if it is not clear.
        channels: the size of C.
        stride: by how many pixels of the input two neighbours are apart, where the input is an image: a number if that
            is the same for all dimensions, else one for each.
        prefix_tokens: how many tokens of L stand for no patch of the image.
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
            return next(info for info in self._infos if info.key == index)
        return self._infos[index]

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
            (i.key, i.node, i.module, "x".join(map(str, i.shape or ())), i.layout, i.channels, i.stride)
            for i in self._infos
        ]
        table = [titles, *[tuple("-" if cell is None else str(cell) for cell in row) for row in rows]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def infos_of(
    wanted: Mapping[str, Node], names: Mapping[str, str], model: nn.Module, image: tuple[int, ...] | None
) -> FeatureInfos:
    """Return what is known of the wanted nodes of a traced graph. O(features).

    Args:
        wanted: the nodes by key.
        names: from the names in the request to keys.
        model: has the modules that are named.
        image: the sizes of the dimensions of the input that are places; None where it has none.
    """
    by_key = {key: name for name, key in names.items()}
    modules = dict(model.named_modules())
    prefixes = _prefixes(model)
    return FeatureInfos([_info(key, by_key[key], node, modules, image, prefixes) for key, node in wanted.items()])


def _prefixes(model: nn.Module) -> tuple[int, ...]:
    """Return how many tokens may stand ahead of those of patches: what the model declares, or one class token.

    It is never guessed from the number of tokens: 32 queries of a model are no 16 patches with 16 others.
    """
    declared = getattr(model, "num_prefix_tokens", None)  # of timm
    if type(declared) is int:
        return (0, declared)
    has_class = any(name.rpartition(".")[2] in _CLASS_TOKENS for name, _ in model.named_parameters())
    return (0, 1) if has_class else (0,)


def _info(
    key: str,
    name: str,
    node: Node,
    modules: Mapping[str, nn.Module],
    image: tuple[int, ...] | None,
    prefixes: tuple[int, ...],
) -> FeatureInfo:
    module = type(modules[name]).__name__ if name in modules else None
    seen: Any = node.meta.get("shape")
    shape: tuple[int, ...] | None = None
    if seen is not None and all(type(size) is int for size in seen):  # a jagged tensor has a length of another class
        shape = tuple(seen)
    patches = None if image is None or shape is None else _patches(shape, image, prefixes)
    layout = _layout(shape, image, modules.get(name), has_patches=patches is not None)
    channels = None if layout is None or shape is None else shape[layout.index("C")]
    stride = None
    if image is not None and shape is not None and layout is not None:
        stride = _stride(layout, shape, image) if patches is None else patches[0]
    prefix = 0 if patches is None else patches[1]
    return FeatureInfo(key, name, module, shape, node.meta.get("dtype"), layout, channels, stride, prefix)


def _layout(
    shape: tuple[int, ...] | None, image: tuple[int, ...] | None, module: nn.Module | None, *, has_patches: bool
) -> str | None:
    dims = 0 if shape is None else len(shape)
    if shape is None or dims < 2 or dims > 5:
        return None
    if dims == 2:
        return "NC"
    places = "DHW"[5 - dims :] if dims > 3 else "L"
    first, last = f"NC{places}", f"N{places}C"
    if image is None or 0 in image or len(image) not in (dims - 2, 2):
        return last if dims == 3 else first
    if dims == 3:
        if not has_patches and isinstance(module, _CHANNELS_FIRST):
            return first
        # An operation on signals says nothing of which dimension is which.
        return last if len(image) == 2 or isinstance(module, _CHANNELS_LAST) else None
    return first if _is_even(shape[2:], image) or not _is_even(shape[1:-1], image) else last


def _is_even(places: tuple[int, ...], image: tuple[int, ...]) -> bool:
    """Say whether all dimensions are reduced alike, up to rounding."""
    if 0 in places or len(places) != len(image):
        return False
    ratios = [size / place for size, place in zip(image, places, strict=True)]
    steps = [1 / place for place in places]
    return all(abs(ratio / ratios[0] - 1) <= 2 * max(steps) for ratio in ratios)


def _patches(shape: tuple[int, ...], image: tuple[int, ...], prefixes: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the side of the patches of tokens, and how many tokens are none; None where the tokens are no patches."""
    if len(shape) != 3 or len(image) != 2 or 0 in image:
        return None
    for prefix in sorted(prefixes):
        for side in range(1, min(image) + 1):
            if all(size % side == 0 for size in image) and shape[1] - prefix == math.prod(image) // side**2:
                return side, prefix
    return None


def _stride(layout: str, shape: tuple[int, ...], image: tuple[int, ...]) -> Any:
    places = [size for size, name in zip(shape, layout, strict=True) if name not in "NC"]
    if not places or 0 in places or len(places) != len(image):
        return None
    strides = [_ratio(size, place) for size, place in zip(image, places, strict=True)]
    return strides[0] if len(set(strides)) == 1 else tuple(strides)


def _ratio(size: int, place: int) -> float:
    """Return the stride that makes `place` of `size`: their ratio, or a power of two that is near.

    Convolutions without padding lose places at the edges.
    """
    ratio = size / place
    if ratio.is_integer():
        return int(ratio)
    power = 2.0 ** round(math.log2(ratio))
    if abs(ratio / power - 1) < _LOST_AT_EDGES or ratio < 1:
        return int(power) if power >= 1 else power
    return round(ratio)
