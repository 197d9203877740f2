"""Run a copy of a model as the model itself runs, with nothing recorded, and put back what that changes outside."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import nn

from featx.tracing.environment.generators import SharedGenerators, TorchGenerator
from featx.tracing.environment.restorers import run_restorers
from featx.tracing.environment.thread_modes import ThreadModes
from featx.tracing.inputs.model_call import as_given
from featx.tracing.objects.module_parts import tensors_of
from featx.tracing.objects.structure import copy_structure
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.side_effects.foreign_tensors import ForeignTensors
from featx.tracing.signals import Untraceable, error_that_refuses
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
    skips_products: bool = False,
    function_mode: AbstractContextManager[Any] | None = None,
    on_write: Callable[[list[torch.Tensor]], None] | None = None,
) -> PlainRun:
    """Run `root`, a replica of the model with tensors of its own.

    Inputs are copied. Other tensors that it writes, torch's modes and random generators are put back. With
    `skips_products` convolutions, batch norms in eval mode and linear layers give zeros, which takes a fraction of the
    time. `function_mode` sees the torch
    calls, and `on_write` gets the tensors that each kernel is about to write.

    Raises:
        TraceError: it advances an iterator that is kept between calls.
    """
    modes, generators, generator = ThreadModes(), SharedGenerators(), TorchGenerator()
    foreign = ForeignTensors(tensor for module in root.modules() for _, tensor in tensors_of(module))

    def note_write(kernel: Any, written: list[torch.Tensor]) -> None:
        foreign.save(written)
        if on_write is not None:
            on_write(written)

    # Other threads may draw from torch's generator meanwhile, so this run draws from one of its own.
    kernels = Kernels(
        functools.partial(_zeros_of, foreign) if skips_products else lambda *kernel: None,
        note_write,
        on_result=lambda given, result: foreign.note_made(result, given),
    )
    bound = inspect.signature(context.function).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        bound.arguments[name] = copy_structure(value, _copied)
    call_args, call_kwargs = as_given(bound, len(args))
    foreign.note_made((call_args, call_kwargs))
    context.refresh_caches(forget_left=True)
    variables = copy_context()  # what it sets of context variables goes with this
    restore_caches = functools.partial(context.caches.restore, lambda tensor: True)  # all are computed from copies
    restorers: list[Callable[[], object]] = [
        restore_caches, foreign.restore, generator.restore, generators.restore, modes.leave,
    ]  # fmt: skip
    try:
        try:
            context.caches.keep_iterators()
            with kernels, function_mode or nullcontext():
                return PlainRun(variables.run(root, *call_args, **call_kwargs), None)
        except Untraceable as signal:
            raise error_that_refuses(context.name, signal.what, signal.place, signal.advice) from signal
        except Exception as error:
            return PlainRun(None, error)
        finally:
            variables.run(run_restorers, restorers)
    finally:
        variables.run(run_restorers, restorers)  # again: an interrupt may have ended the first one


def _zeros_of(
    foreign: ForeignTensors, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[torch.Tensor]
) -> Any:
    """Return zeros of the form of what a kernel returns that computes for long; None for other kernels."""
    make = None if kwargs else _COSTLY.get(kernel)
    result = None if make is None else make(*args)
    if result is not None:
        foreign.note_made(result, given)
    return result


def _of_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, *others: object,
) -> torch.Tensor | None:  # fmt: skip
    dims = x.dim() - 2
    if transposed or not len(stride) == len(padding) == len(dilation) == dims:
        return None
    lengths = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    sizes = [(size + 2 * around - apart * (width - 1) - 1) // step + 1 for size, width, step, around, apart in lengths]
    return x.new_zeros(len(x), len(weight), *sizes)


def _of_batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *others: object
) -> tuple[torch.Tensor, ...] | None:
    return None if training else (torch.zeros_like(x), x.new_empty(0), x.new_empty(0))


def _of_product(bias: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one.new_zeros(one.shape[0], other.shape[1])


_COSTLY: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution.default: _of_convolution,
    torch.ops.aten.native_batch_norm.default: _of_batch_norm,
    torch.ops.aten.addmm.default: _of_product,
}


def _copied(value: Any, path: object) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
