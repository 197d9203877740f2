"""Put modules into eval mode for a while, and give each of them its own mode back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from featx.features.dual import DualGraphModule


@contextmanager
def modes_kept(model: nn.Module) -> Generator[None]:
    """Give each module of a model back the mode in which it is now; `train()` would give all of them the same one."""
    is_training = model.training
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        if isinstance(model, DualGraphModule):  # which has a graph for each mode
            model.train(is_training)
        for module, training in modes:
            if module.training is not training:
                module.training = training
