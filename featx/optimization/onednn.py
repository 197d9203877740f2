"""Linear layers that oneDNN computes: PyTorch gives float32 matrices to MKL, which is slow on processors of AMD."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from featx.ir.repeatable import has_hooks


class OneDNNLinear(nn.Linear):
    """A linear layer that is computed as a convolution of size 1, which PyTorch gives to oneDNN."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return `input` times the weights, plus the bias."""
        if input.numel() == 0:  # a convolution wants at least one row
            return super().forward(input)
        rows = input.reshape(1, -1, 1, self.in_features).permute(0, 3, 1, 2)  # channels last, and not copied
        found = functional.conv2d(rows, self.weight[:, :, None, None], self.bias)
        return found.permute(0, 2, 3, 1).reshape(*input.shape[:-1], self.out_features)


def is_available() -> bool:
    """Say whether PyTorch was built with oneDNN."""
    return torch.backends.mkldnn.is_available()


def compute_linears_by_onednn(module: nn.Module) -> None:
    """Let the linear layers of torch in a module be computed by oneDNN; those with hooks stay as they are."""
    for part in module.modules():
        if type(part) is nn.Linear and not has_hooks(part) and "forward" not in part.__dict__:
            part.__class__ = OneDNNLinear
