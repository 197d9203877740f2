"""Run a copy of a model as the model itself runs, with nothing recorded, and put back what that changes outside."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from featx.tracing.environment.generators import SharedGenerators, TorchGenerator
from featx.tracing.environment.thread_modes import ThreadModes
from featx.tracing.example.model_call import as_given
from featx.tracing.file_globals.saved_tensors import SavedGlobals
from featx.tracing.objects.structure import copy_structure
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.stand_ins.kernels import Kernels


class PlainRun(NamedTuple):
    """What a run has returned, or the error that it has raised."""

    result: Any
    error: Exception | None


def run_plainly(around: ModelContext, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlainRun:
    """Run `root`, a replica of the model with tensors of its own.

    Inputs are copied. Globals of the model's files, torch's modes and random generators are put back.
    """
    modes, generators, generator = ThreadModes(), SharedGenerators(), TorchGenerator()
    saved = SavedGlobals(around.global_tensors)
    saved.save(chain.from_iterable(around.global_tensors.values()))
    # Other threads may draw from torch's generator meanwhile, so this run draws from one of its own.
    kernels = Kernels(lambda *kernel: None, lambda kernel, written: None)
    bound = inspect.signature(around.function).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        bound.arguments[name] = copy_structure(value, _copied)
    call_args, call_kwargs = as_given(bound, len(args))
    around.refresh_caches(forget_left=True)
    try:
        with kernels:
            return PlainRun(root(*call_args, **call_kwargs), None)
    except Exception as error:
        return PlainRun(None, error)
    finally:
        modes.leave()
        generators.restore()
        generator.restore()
        saved.restore()
        around.caches.restore(lambda tensor: True)  # whatever came in, it was computed from copies


def _copied(value: Any, path: object) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
