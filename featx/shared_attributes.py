"""Give a module attributes of another one, or new ones, at dotted paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from featx.containers import empty_like
from featx.errors import TargetError


def share(source: nn.Module, destination: nn.Module, path: str) -> None:
    """Give `destination` the attribute of `source` at `path`: the same object, registered in the same way.

    Raises:
        TargetError: a name on the way means something else on every module.
        AttributeError: `source` has no such attribute.
    """
    # Tensors are fetched with get(), which a trace that runs around this does not watch.
    *parents, name = path.split(".")
    for depth, part in enumerate(parents):
        child = source._modules.get(part)
        if child is None:
            # The path runs through a plain attribute; that object is shared as a whole.
            setattr(destination, part, getattr(source, part))
            return
        twin = destination._modules.get(part)
        if twin is child:
            for inner in (*parents[depth + 1 :], name):
                _check_readable(inner, path)
            return
        if twin is None:
            _check_readable(part, path)
            twin = empty_like(child)
            twin.training = child.training
            destination.add_module(part, twin)
        source, destination = child, twin
    if name in source._modules or name in source._parameters or name in source._buffers:
        _check_readable(name, path)
    if name in source._modules:
        destination._modules[name] = source._modules[name]
    elif name in source._parameters:
        destination.register_parameter(name, source._parameters.get(name))
    elif name in source._buffers:
        persistent = name not in source._non_persistent_buffers_set
        destination.register_buffer(name, source._buffers.get(name), persistent=persistent)
    else:
        setattr(destination, name, getattr(source, name))


def _check_readable(name: str, path: str) -> None:
    # Registered past the methods of nn.Module that refuse such names; reading the attribute gives something else.
    if hasattr(nn.Module, name) or name in nn.Module.__annotations__:
        raise TargetError(
            f"'{path}' runs through a module or tensor named '{name}', but '{name}' of every nn.Module is something "
            "else; rename that attribute of the model"
        )


def install(destination: nn.Module, path: str, value: Any) -> None:
    """Give `destination` the attribute `value` at `path`, with empty modules on the way.

    Raises:
        TargetError: a name on the way means something else on every module.
    """
    *parents, name = path.split(".")
    for part in parents:
        if not hasattr(destination, part):
            destination.add_module(part, nn.Module())
        _check_readable(part, path)
        destination = getattr(destination, part)
    _check_readable(name, path)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        destination.register_buffer(name, value)
    else:
        setattr(destination, name, value)
