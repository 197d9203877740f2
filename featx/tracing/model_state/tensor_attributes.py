"""The attributes that somebody has given to the tensors of a model, which a replica shares with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from featx.rebuilding import NO_VALUE


class TensorAttributes:
    """What tensors had as attributes of their own when this was made. O(tensors), as are its methods."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._all = list(tensors)
        self._before: dict[int, dict[str, Any]] = {id(each): vars(each).copy() for each in self._all if each.__dict__}

    def changed(self) -> tuple[torch.Tensor, str] | None:
        """Return a tensor with the name of an attribute that it has now, and did not have, or had another value of."""
        return next(((tensor, name) for tensor in self._all for name in self._changed_of(tensor)), None)

    def restore(self) -> None:
        """Put all of them back. May be called twice."""
        for tensor in self._all:
            attributes: Any = tensor.__dict__
            for name in self._changed_of(tensor):
                attributes.pop(name, None)
                before = self._before.get(id(tensor), {})
                if name in before:
                    attributes[name] = before[name]

    def _changed_of(self, tensor: torch.Tensor) -> list[str]:
        now, before = tensor.__dict__, self._before.get(id(tensor), {})
        if not now and not before:
            return []
        return [name for name in {*now, *before} if now.get(name, NO_VALUE) is not before.get(name, NO_VALUE)]
