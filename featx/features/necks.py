"""A backbone followed by a module that takes its maps, such as a feature pyramid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, RequestError
from featx.features.dual import DualGraphModule
from featx.features.modes import modes_kept


class BackboneWithNeck(nn.Module):
    """A backbone and a module that takes its result.

    Attributes:
        body: the backbone.
        neck: the module.
        channels: of each value that the neck returns.
        out_channels: one number where all of them are the same, else a list.
    """

    def __init__(self, body: DualGraphModule, neck: nn.Module) -> None:
        if not isinstance(cast(object, neck), nn.Module):
            raise ArgumentTypeError(f"neck must be a module that takes the maps of the backbone, got {neck!r:.80}")
        super().__init__()
        self.body = body
        self.neck = neck
        self.channels = _channels_after(neck, body)
        self.out_channels: Any = self.channels[0] if len(set(self.channels)) == 1 else self.channels

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the neck makes of the maps of these inputs."""
        return self.neck(self.body(*args, **kwargs))

    def __prepare_scriptable__(self) -> nn.Module:
        """Return a module that does the same with one tensor, as `torch.jit.script` asks for."""
        return _OfOneTensor(self.body, self.neck)


class _OfOneTensor(nn.Module):
    def __init__(self, body: nn.Module, neck: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.neck = neck
        self.training = body.training

    def forward(self, x: torch.Tensor):  # TorchScript finds out what it returns
        return self.neck(self.body(x))


def _channels_after(neck: nn.Module, body: DualGraphModule) -> list[int]:
    """Return the channels of the values that a neck makes of the maps of a backbone; it runs once, on zeros.

    Raises:
        RequestError: it does not take them, or returns something else than maps.
    """
    maps = {info.key: torch.zeros(info.shape or (), dtype=info.dtype) for info in body.feature_info}
    is_list = not isinstance(body.graph.output_node().args[0], dict)
    weight = next(neck.parameters(), None)
    given: Any = {key: value.to(weight) for key, value in maps.items()} if weight is not None else maps
    kinds = ", ".join(f"{key}: {tuple(value.shape)}" for key, value in maps.items())
    try:
        with modes_kept(neck), torch.no_grad():
            result: Any = neck.eval()(list(given.values()) if is_list else given)
    except Exception as error:  # the neck's own
        raise RequestError(
            f"the neck, a {type(neck).__name__}, does not take the {'list' if is_list else 'dict'} of the maps of this "
            f"backbone ({kinds}; backbone.channels is {body.channels}): {type(error).__name__}: {error}"
        ) from error
    values = result.values() if isinstance(result, Mapping) else [result] if torch.is_tensor(result) else result
    values = list(values) if isinstance(values, Iterable) else [values]
    if not values or not all(isinstance(each, torch.Tensor) and each.dim() > 1 for each in values):
        raise RequestError(
            f"the neck, a {type(neck).__name__}, must return maps, as a tensor or in a dict or list; it returns "
            f"{type(result).__name__} for maps of {kinds}"
        )
    return [value.shape[1] for value in values]
