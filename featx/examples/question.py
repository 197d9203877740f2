"""A model for which inputs are looked for, and where their values come from."""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn

# What asking strangers raises: a config that lacks a value, has one of another kind, or one that fits nothing.
UNKNOWN = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_DRAWS = 16381  # prime, so that no two rows of an image are the same


class Question:
    """A model, what its forward takes, and the generator that the values come from.

    Args:
        model: the model.
        training: whether inputs for train mode are wanted.

    Attributes:
        parameters: what its forward takes, by name.
        required: the names of those without a default.
        is_variadic: whether forward takes `*args` and `**kwargs`, and nothing else.
    """

    def __init__(self, model: nn.Module, training: bool) -> None:
        self.model = model
        self.training = training
        self.parameters = dict(inspect.signature(model.forward).parameters)
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [each for each in self.parameters.values() if each.kind not in variadic]
        self.is_variadic = not named and len(self.parameters) == 2
        needed = [each for each in named if each.default is each.empty]
        self.required = [parameter.name for parameter in needed]
        floating = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        self._dtype = next(floating, torch.float32)
        self._generator = torch.Generator().manual_seed(0)

    def floats(self, *shape: int) -> Tensor:
        """Return values between 0 and 1, of the dtype of the model."""
        # The caller may have set another default device, which the generator would not fit. A large image has the same
        # draws again and again: to draw them all, or to wake torch's threads, takes as long as tracing a small model.
        values = torch.empty(math.prod(shape), device="cpu", dtype=torch.float32)
        draws = torch.rand(_DRAWS, generator=self._generator, device="cpu", dtype=torch.float32)
        for piece in values.split(_DRAWS):
            piece.copy_(draws[: len(piece)])
        return values.view(shape).to(self._dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Return integers from 0 to `high` - 1."""
        return torch.randint(high, shape, generator=self._generator, device="cpu")
