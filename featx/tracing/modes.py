"""Put a model into train or eval mode for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Generator[None]:
    """Put `model` into train or eval mode; afterwards each submodule has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    try:
        model.train(training)
        yield
    finally:
        if model.training != was_training:
            model.train(was_training)  # a model may do more than set flags here
        for module, mode in modes:
            module.__dict__["training"] = mode
