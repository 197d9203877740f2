"""Which classes of modules are torch's own layers, and what else is defined by torch."""

from __future__ import annotations

from torch import nn

# Layers that return their input in eval mode, and a new tensor in train mode.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def is_of_torch(definition: object) -> bool:
    """Say whether a class or function is defined in a module of torch, such as `torch.nn.utils`."""
    return str(getattr(definition, "__module__", "")).startswith("torch.")


def is_torch_layer(kind: type) -> bool:
    """Say whether a class is a layer of `torch.nn`, whose effects are known. Subclasses of the user's are not."""
    return kind.__module__.startswith("torch.nn.modules.")
