"""The attributes that somebody has given to the tensors of a model, which a replica shares with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from featx.rebuilding import NO_VALUE
from featx.tracing.objects.containers import differences


class TensorAttributes:
    """What tensors had as attributes of their own when this was made. O(tensors), as are its methods."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._all = list(tensors)
        self._before: dict[int, dict[str, Any]] = {id(each): vars(each).copy() for each in self._all if each.__dict__}

    def changed(self) -> tuple[torch.Tensor, str] | None:
        """Return a tensor with the name of an attribute that it has now, and did not have, or had another value of."""
        return next(((tensor, name) for tensor in self._all for name, _ in self._changed_of(tensor)), None)

    def restore(self) -> None:
        """Put all of them back. May be called twice."""
        for tensor in self._all:
            attributes: Any = tensor.__dict__
            for name, before in self._changed_of(tensor):
                if before is NO_VALUE:
                    del attributes[name]
                else:
                    attributes[name] = before

    def _changed_of(self, tensor: torch.Tensor) -> list[tuple[str, Any]]:
        """Return name and former value of what is another attribute now."""
        changed = differences(self._before.get(id(tensor), {}), tensor.__dict__)
        return [(name, before) for name, before, _ in changed]
