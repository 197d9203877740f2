"""Which modules are one node by default."""

from __future__ import annotations

import torch
from torch import nn


def is_leaf_class(kind: type[nn.Module]) -> bool:
    """Say whether modules of a class are one node by default: torch.nn's except Sequential, and scripted ones."""
    is_of_torch = kind.__module__.startswith(("torch.nn", "torch.ao.nn"))
    return issubclass(kind, torch.jit.ScriptModule) or (is_of_torch and not issubclass(kind, nn.Sequential))
