"""Feature: what is done to a value before an extractor returns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from featx.errors import ArgumentTypeError

Pool = Literal["avg", "max", "gem", "cls", "last"]
PrefixTokens = Literal["keep", "drop", "apart"]
MAPS, SEQUENCES, VOLUMES = ("NCHW", "NHWC"), ("NCL", "NLC"), ("NCDHW", "NDHWC")
_LAYOUTS = (*MAPS, *SEQUENCES, *VOLUMES)


class OwnMask(str):
    """The name of the mask that `Feature` looks for where none is named."""

    __slots__ = ()


OWN_MASK = OwnMask("attention_mask")


@dataclass(frozen=True)
class Feature:
    """A requested value and what is done to it, in the order of these arguments; it stands in the place of a key.

    Args:
        key: its key in the result; by default its name. A `*` stands for what a pattern has matched.
        detach: cut it off from the graph of gradients.
        pool: reduce its places, or its tokens but for those that `FeatureInfo.prefix_tokens` counts: "avg" and "max";
            "gem", the generalized mean
            `mean(max(x, 1e-6) ** 3) ** (1 / 3)` (Radenovic et al., Fine-tuning CNN Image Retrieval with No Human
            Annotation, 2018); "cls", the class token, or the first token of a text; "last", the last token of a text.
            Of a text, tokens whose `mask` is 0 are left out.
        layout: permute to this: "NCHW" or "NHWC" for maps, "NCL" or "NLC" for sequences, "NCDHW" or "NDHWC" for
            videos. Tokens of patches become maps by the first two, without those that `FeatureInfo.prefix_tokens`
            counts, and maps become sequences by "NCL" and "NLC".
        prefix_tokens: what to do with the tokens that stand before those of patches: "keep" them, "drop" them, or
            put them "apart", as a value of their own under the key with `_prefix` after it.
        flatten: make one dimension of all but the first.
        apply: a function of the tensor, or a module, which becomes a part of the extractor with its parameters. It is
            called once with a tensor without values, for the shape of what it returns.
        dtype: cast to this.
        of_layout: the layout of the value, where the trace cannot tell.
        of_stride: the side of the patches that tokens stand for, where the trace cannot tell: the image has
            `height // of_stride * width // of_stride` of them, after the prefix tokens.
        mask: the input of shape (N, L) that is not 0 for the tokens that `pool` is to count. By default it is
            `attention_mask`, and `decoder_attention_mask` for what is computed from a decoder's input, where the model
            gets such an input. None counts all.

    Raises:
        ArgumentTypeError: an argument is of the wrong type, or an unknown name.
    """

    key: str | None = None
    _: KW_ONLY
    detach: bool = False
    pool: Pool | None = None
    layout: str | None = None
    flatten: bool = False
    apply: Callable[[torch.Tensor], Any] | nn.Module | None = None
    dtype: torch.dtype | None = None
    of_layout: str | None = None
    prefix_tokens: PrefixTokens = "keep"
    of_stride: int | None = None
    mask: str | None = OWN_MASK

    def __post_init__(self) -> None:
        if type(self.detach) is not bool or type(self.flatten) is not bool:
            raise ArgumentTypeError(f"detach and flatten are True or False, got {self.detach!r} and {self.flatten!r}")
        if self.pool is not None and self.pool not in get_args(Pool):
            raise ArgumentTypeError(f"pool must be one of {', '.join(get_args(Pool))}, got {self.pool!r}")
        if self.prefix_tokens not in get_args(PrefixTokens):
            raise ArgumentTypeError(
                f"prefix_tokens must be one of {', '.join(get_args(PrefixTokens))}, got {self.prefix_tokens!r}"
            )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"dtype must be a torch.dtype, got {self.dtype!r}")
        if self.layout is not None and self.layout not in _LAYOUTS:
            raise ArgumentTypeError(f"layout must be one of {', '.join(_LAYOUTS)}, got {self.layout!r}")
        if self.of_layout is not None and not _is_layout(self.of_layout):
            raise ArgumentTypeError(
                "of_layout has N, C and the places (L, HW or DHW) in the order of the dimensions, such as 'NHWC' or "
                f"'LNC', got {self.of_layout!r}"
            )
        if self.of_stride is not None and (type(self.of_stride) is not int or self.of_stride < 1):
            raise ArgumentTypeError(f"of_stride must be a positive number, got {self.of_stride!r}")
        if self.mask is not None and not isinstance(self.mask, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"mask must be the name of an input, or None, got {self.mask!r:.80}")
        if self.apply is not None and (isinstance(self.apply, type) or not callable(self.apply)):
            raise ArgumentTypeError(f"apply must be a function or a module, got {self.apply!r:.80}")


def _is_layout(value: object) -> bool:
    """Say whether a value names each dimension once: the samples, the channels, and places in their order."""
    if not isinstance(value, str) or value.count("N") != 1 or value.count("C") != 1:
        return False
    return value.replace("N", "").replace("C", "") in ("", "L", "W", "HW", "DHW")
