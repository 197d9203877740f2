"""Put a model into train or eval mode for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from featx.tracing.scope import walk_modules
from featx.tracing.state import ModuleState


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Generator[None]:
    """Put `model` into train or eval mode; afterwards each submodule has its own mode again.

    What a module that overrides `train` does to its own weights (LoRA merges them in) is undone to the last bit.
    """
    modes = [(module, module.training) for _, module in walk_modules(model)]
    was_training = model.training
    # A model may do more than set flags here.
    switching = [module for module, _ in modes if not only_sets_flags(module)]
    is_there = not switching and all(mode is training for _, mode in modes)
    states = [ModuleState(module) for module in switching]
    tensors = [tensor for module in switching for tensor in (*module.parameters(), *module.buffers())]
    distinct = {id(tensor): tensor for tensor in tensors if not tensor.is_meta}
    saved = [(tensor, tensor.detach().clone()) for tensor in distinct.values()]
    # Setting the flags one by one takes nn.Module ten times as long as putting them where they are.
    are_flags = not switching and all("training" in module.__dict__ for module, _ in modes)
    try:
        if are_flags:
            for module, _ in modes:
                module.__dict__["training"] = training
        elif not is_there:
            model.train(training)
        yield
    finally:
        if model.training != was_training and not are_flags:
            model.train(was_training)
        for module, mode in modes:
            module.__dict__["training"] = mode
        with torch.no_grad():
            for tensor, before in saved:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        for state in states:
            state.restore(lambda value: False)


def only_sets_flags(module: nn.Module) -> bool:
    """Say whether `train` of a module does no more than to set flags."""
    return type(module).train is nn.Module.train
