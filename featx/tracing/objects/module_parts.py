"""The tensors of modules, the functions and classes that they hold, their `forward` and their hooks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from featx.ir.modules import modules_of
from featx.ir.paths import attribute_at


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return name and tensor of what a module holds itself: parameters, buffers, and plain attributes."""
    found: list[tuple[str, torch.Tensor]] = [
        (name, value) for name, value in module._parameters.items() if value is not None
    ]
    if module._buffers:
        found += [(name, value) for name, value in module._buffers.items() if value is not None]
    state = module.__dict__
    if torch.Tensor in map(type, state.values()):
        found += [(name, value) for name, value in state.items() if type(value) is torch.Tensor]
    return found


def definitions_in(modules: Iterable[nn.Module]) -> list[FunctionType | type]:
    """Return the functions and classes among the attributes of modules, each once. O(attributes)."""
    values = (value for module in modules for value in module.__dict__.values())
    return list(dict.fromkeys(value for value in values if isinstance(value, (FunctionType, type))))


def parameters_and_buffers(root: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of `root` and of all modules in it. Takes a third as long as torch's own."""
    return [
        tensor
        for module in modules_of(root)
        for held in (module._parameters, module._buffers)
        if held
        for tensor in held.values()
        if tensor is not None
    ]


def forward_of(module: nn.Module) -> Any:
    """Return the function that a call of a module runs, without what decorates it."""
    forward = module.__dict__.get("forward", type(module).forward)
    return inspect.unwrap(getattr(forward, "__func__", forward))


def registered_tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter and buffer of a model with its path; one that has several paths, with each of them."""
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def tensors_at(root: nn.Module, paths: Iterable[str]) -> set[int]:
    """Return the ids of the tensors at these paths, and of those of modules at them."""
    found: set[int] = set()
    for path in paths:
        value = attribute_at(root, path) if path else root
        if isinstance(value, nn.Module):
            found.update(map(id, (*value.parameters(), *value.buffers())))
        elif isinstance(value, torch.Tensor):
            found.add(id(value))
    return found


def has_forward_hooks(module: nn.Module) -> bool:
    """Say whether a call of a module runs hooks of its own around `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
