"""Turn a module and a call into all that came of it: result, inputs afterwards, gradients, random state."""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from differences import memory, tensors_in
from inputs import Arguments
from torch import nn


@dataclass
class Outcome:
    result: Any = None
    error: BaseException | None = None
    memory: tuple[int, ...] = ()
    inputs: Any = None
    generators: Any = None
    gradients: Any = None


def run(module: nn.Module, arguments: Arguments, *, grad: bool, gradients: bool = False) -> Outcome:
    """Run on copies of the arguments, strides included, from one seed, with gradients switched on or off."""
    args, kwargs = copy.deepcopy(arguments)
    seed()
    try:
        with torch.set_grad_enabled(grad):
            result = module(*args, **kwargs)
    except Exception as error:
        return Outcome(error=error)
    outcome = Outcome(
        # The result may be memory of the model, which the next call writes.
        result=copied(result),
        memory=memory([args, kwargs, result]),
        inputs=(args, kwargs),
        generators=generators(),
    )
    if gradients:
        outcome.gradients = _gradients(module, result)
    return outcome


def seed() -> None:
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)


def generators() -> tuple[bytes, Any, bytes]:
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()


def copied(value: Any) -> Any:
    """Copy tensors with their strides; requires_grad is kept, history is not."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            copy_of_it = value.detach().clone()
            # A write out of place can leave integers that claim to require gradients.
            can_require = value.is_floating_point() or value.is_complex()
            return copy_of_it.requires_grad_(value.requires_grad) if can_require else copy_of_it
    if isinstance(value, dict):
        return type(value)((key, copied(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return value


def _gradients(module: nn.Module, result: Any) -> dict[str, Any]:
    wanted = [value for value in tensors_in(result) if value.requires_grad and value.is_floating_point()]
    parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
    if not wanted or not parameters:
        return {}
    try:
        found = torch.autograd.grad(sum(value.sum() for value in wanted), [*parameters.values()], allow_unused=True)
    except RuntimeError as error:
        return {"error": type(error)}
    # A graph may list its parameters in another order than the model.
    pairs = sorted(zip(parameters, found, strict=True), key=lambda pair: pair[0])
    return {name: value for name, value in pairs if value is not None}


def outer_state(model: nn.Module) -> dict[str, Any]:
    """Copy the globals that models write."""
    names = vars(sys.modules[type(model).__module__])
    return {name: copy.deepcopy(names[name]) for name in ("GLOBALS", "TABLE") if name in names}


def set_outer_state(model: nn.Module, values: dict[str, Any]) -> None:
    names = vars(sys.modules[type(model).__module__])
    for name, value in values.items():
        if isinstance(value, dict):
            names[name].update(value)
        else:
            names[name].copy_(value)
