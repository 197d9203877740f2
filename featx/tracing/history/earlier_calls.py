"""Tensors that earlier calls on the same replica have made, and that live on."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from featx.tracing.signals import UnsupportedSideEffect
from featx.tree import tree_leaves


class EarlierCalls:
    """What earlier calls on the replica of a trace have kept.

    Args:
        from_inputs: tensors that were computed from the inputs of such a call, by id.
        constants: those that were made from sizes and constants, such as caches, by id.
        of_sizes: the ids of those among the constants that were made from sizes.
    """

    def __init__(
        self,
        from_inputs: dict[int, torch.Tensor] | None = None,
        constants: dict[int, torch.Tensor] | None = None,
        of_sizes: Collection[int] = (),
    ) -> None:
        self.from_inputs = from_inputs or {}
        self.constants = constants or {}
        self.of_sizes = of_sizes

    def forget(self, tensor: torch.Tensor) -> None:
        """Take note that a call of the present run has returned the tensor: a module gives what it has kept."""
        self.from_inputs.pop(id(tensor), None)

    def refuse(self, *values: Any) -> None:
        """Raise where one of these is a tensor that an earlier call has computed from its inputs."""
        if self.from_inputs and any(id(leaf) in self.from_inputs for leaf in tree_leaves(values)):
            raise UnsupportedSideEffect("forward reads what it has computed from the inputs of an earlier call")
