"""Pooling of tokens by a mask, and the generalized mean, as the graph of an extractor calls them."""

from __future__ import annotations

import torch


def pool_tokens(tokens: torch.Tensor, how: str, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return one vector for each sample, of the tokens that a mask counts. O(tokens).

    Args:
        tokens: of shape (N, L, C).
        how: "avg", "max" or "gem" over the tokens; "cls" for the first one, "last" for the last one.
        mask: of shape (N, L), not zero where a token counts; None if all do. A sample without any has an average of
            0 and a largest value of minus infinity.

    Returns:
        A tensor of shape (N, C).

    Raises:
        ValueError: the mask has another shape.
    """
    if mask is None:
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    if mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"the mask for pooling has the shape {tuple(mask.shape)}, and the tokens are {tuple(tokens.shape[:2])}"
        )
    counts = mask != 0
    if how in ("cls", "last"):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if how == "cls":
            place = torch.where(counts, places, tokens.shape[1] - 1).amin(1)
        else:
            place = torch.where(counts, places, 0).amax(1)
        return tokens[torch.arange(tokens.shape[0], device=tokens.device), place]
    if how == "max":
        return tokens.masked_fill(~counts[..., None], float("-inf")).amax(1)
    wide = torch.promote_types(tokens.dtype, torch.float32)  # sums and powers may be too large for half precision
    values = tokens.to(wide).clamp(1e-6).pow(3.0) if how == "gem" else tokens
    total = values.masked_fill(~counts[..., None], 0.0).sum(1, dtype=wide)
    mean = total / counts.sum(1, keepdim=True).clamp(min=1)
    return (mean.pow(1.0 / 3.0) if how == "gem" else mean).to(tokens.dtype)


def generalized_mean(value: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Return `mean(max(x, 1e-6) ** 3) ** (1 / 3)` over some dimensions, in the dtype of the value.

    It is computed in single precision at least, as the third power of 41 is none of float16.
    """
    wide = value * value.new_ones(1, dtype=torch.float32)  # with no branch, so that a trace holds for each dtype
    return wide.clamp(1e-6).pow(3.0).mean(dims).pow(1.0 / 3.0).to(value.dtype)
