"""Which classes of modules are torch's own layers."""

from __future__ import annotations


def is_torch_layer(kind: type) -> bool:
    """Say whether a class is a layer of `torch.nn`, whose effects are known. Subclasses of the user's are not."""
    return kind.__module__.startswith("torch.nn.modules.")
