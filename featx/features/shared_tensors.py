"""Keep parameters and buffers shared between modules that are converted one after the other."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def tensors_kept_shared(model: nn.Module, others: Iterable[nn.Module]) -> Generator[None]:
    """Give `others` the tensors of `model` again that they share with it now.

    `Module._apply`, after `to()`, `half()` and `to_empty()`, gives each module that has a buffer a new one, and
    parameters too where it cannot convert them in place.
    """
    places = {id(tensor): (tensors, name) for tensors, name, tensor in _tensors_of(model)}
    shared = [
        (tensors, name, *places[id(tensor)])
        for other in others
        for tensors, name, tensor in _tensors_of(other)
        if id(tensor) in places
    ]
    try:
        yield
    finally:
        for tensors, name, original, name_there in shared:
            tensors[name] = original[name_there]


def _tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield the dicts that hold the tensors of a module and of its submodules, with the name of each tensor."""
    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield tensors, name, tensor
