"""Recipe: what is done to an extractor to make it faster."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from featx.module import GraphModule
from featx.passes.dropout import remove_dropout
from featx.passes.fuse import fuse_conv_bn
from featx.passes.identity import remove_identity
from featx.passes.layer_scale import fold_layer_scale
from featx.passes.parallel_linears import merge_parallel_linears

# What edits the graph, in the order in which it is done, and what gives bit for bit the same values.
REWRITES = {
    "remove_dropout": remove_dropout,
    "remove_identity": remove_identity,
    "fuse_conv_bn": fuse_conv_bn,
    "fold_layer_scale": fold_layer_scale,
    "merge_parallel_linears": merge_parallel_linears,
}
EXACT_REWRITES = ("remove_dropout", "remove_identity")
# How torch.compile is called for each kind of compilation. A launch of a recorded graph runs the kernels of before.
RECORDED = "recorded CUDA graphs"
# What compiles in place of torch.compile.
OPENVINO = "OpenVINO"
COMPILATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "freezing": {"options": {"freezing": True}},
    "CUDA graphs": {"mode": "reduce-overhead"},
    RECORDED: {"backend": "cudagraphs", "dynamic": False},
}


@dataclass(frozen=True)
class Recipe:
    """What is done to an extractor. The empty recipe does nothing.

    Attributes:
        rewrites: passes that edit its graph, names of `REWRITES`.
        dtype: of its weights and of what it computes: "bfloat16" or "float16"; None leaves it.
        channels_last: weights and inputs of four dimensions have their channels last in memory.
        onednn: linear layers are computed by oneDNN in place of MKL, on a CPU.
        int8: linear layers compute in int8 by torchao, on weights quantized per channel and inputs quantized per token.
        compile: the kind of compilation by torch.compile, a key of `COMPILATIONS`; or `OPENVINO`; None is none.
        threads: how many threads compute; None leaves torch's setting.
        rows: so many samples are computed at once, and larger batches in parts of that; None is all.
    """

    rewrites: tuple[str, ...] = ()
    dtype: str | None = None
    channels_last: bool = False
    onednn: bool = False
    int8: bool = False
    compile: str | None = None
    threads: int | None = None
    rows: int | None = None

    @property
    def is_exact(self) -> bool:
        """Whether results are bit for bit the same, whatever the input is."""
        return self == Recipe(rewrites=self.rewrites) and set(self.rewrites) <= set(EXACT_REWRITES)

    @property
    def overwrites_results(self) -> bool:
        """Whether the tensors that the compiled code returns are written again by its next call."""
        return self.compile in ("CUDA graphs", RECORDED)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype itself."""
        return None if self.dtype is None else getattr(torch, self.dtype)

    def rewrite(self, gm: GraphModule) -> tuple[str, ...]:
        """Edit the graph of `gm`; return which of the rewrites have changed anything."""
        return tuple(name for name in REWRITES if name in self.rewrites and REWRITES[name](gm))

    def __str__(self) -> str:
        words = list(self.rewrites)
        words += [self.dtype] if self.dtype else []
        words += ["channels last"] if self.channels_last else []
        words += ["oneDNN linears"] if self.onednn else []
        words += ["int8"] if self.int8 else []
        words += {None: [], "default": ["compile"], OPENVINO: [OPENVINO]}.get(
            self.compile, [f"compile ({self.compile})"]
        )
        words += [f"{self.threads} threads"] if self.threads else []
        words += [f"{self.rows} samples at once"] if self.rows else []
        return ", ".join(words) or "as it is"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Recipe:
        """Return what `to_json` has written. Unknown fields are a TypeError."""
        known = {field.name for field in fields(Recipe)}
        if unknown := set(value) - known:
            raise TypeError(f"unknown fields {sorted(unknown)}")
        fitting: dict[str, Any] = {**value, "rewrites": tuple(value.get("rewrites", ()))}
        return Recipe(**fitting)
