"""Run a copy of a model as the model itself runs, with nothing recorded, and put back what that changes outside."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from featx.tracing.environment.generators import SharedGenerators, TorchGenerator
from featx.tracing.environment.thread_modes import ThreadModes
from featx.tracing.inputs.model_call import as_given
from featx.tracing.objects.module_tree import tensors_of
from featx.tracing.objects.structure import copy_structure
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.side_effects.foreign_tensors import ForeignTensors
from featx.tracing.stand_ins.kernels import Kernels


class PlainRun(NamedTuple):
    """What a run has returned, or the error that it has raised."""

    result: Any
    error: Exception | None


def run_plainly(
    context: ModelContext,
    root: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    skips_convolutions: bool = False,
    function_mode: AbstractContextManager[Any] | None = None,
    on_write: Callable[[list[torch.Tensor]], None] | None = None,
) -> PlainRun:
    """Run `root`, a replica of the model with tensors of its own.

    Inputs are copied. Other tensors that it writes, torch's modes and random generators are put back. With
    `skips_convolutions` convolutions give zeros, which takes a fraction of the time. `function_mode` sees the torch
    calls, and `on_write` gets the tensors that each kernel is about to write.
    """
    modes, generators, generator = ThreadModes(), SharedGenerators(), TorchGenerator()
    foreign = ForeignTensors(tensor for module in root.modules() for _, tensor in tensors_of(module))

    def note_write(kernel: Any, written: list[torch.Tensor]) -> None:
        foreign.save(written)
        if on_write is not None:
            on_write(written)

    # Other threads may draw from torch's generator meanwhile, so this run draws from one of its own.
    kernels = Kernels(
        functools.partial(_zeros_of_convolution, foreign) if skips_convolutions else lambda *kernel: None,
        note_write,
        on_result=lambda given, result: foreign.note_made(result, given),
    )
    bound = inspect.signature(context.function).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        bound.arguments[name] = copy_structure(value, _copied)
    call_args, call_kwargs = as_given(bound, len(args))
    foreign.note_made((call_args, call_kwargs))
    context.refresh_caches(forget_left=True)
    try:
        with kernels, function_mode or nullcontext():
            return PlainRun(root(*call_args, **call_kwargs), None)
    except Exception as error:
        return PlainRun(None, error)
    finally:
        modes.leave()
        generators.restore()
        generator.restore()
        foreign.restore()
        context.caches.restore(lambda tensor: True)  # whatever came in, it was computed from copies


def _zeros_of_convolution(
    foreign: ForeignTensors, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
) -> torch.Tensor | None:
    """Return zeros of the form that a convolution has; None for other kernels."""
    is_known = kernel is torch.ops.aten.convolution.default and not kwargs
    if not is_known or args[6]:  # transposed
        return None
    x, weight, _, *options = args[:6]
    if any(len(option) != x.dim() - 2 for option in options):
        return None
    lengths = zip(x.shape[2:], weight.shape[2:], *options, strict=True)
    sizes = [
        (size + 2 * padding - dilation * (width - 1) - 1) // stride + 1
        for size, width, stride, padding, dilation in lengths
    ]
    result = x.new_zeros(len(x), len(weight), *sizes)
    foreign.note_made(result, given)
    return result


def _copied(value: Any, path: object) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
