"""Run a copy of a model as the model itself runs, with nothing recorded, and put back what that changes outside."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from featx.ir.memory import memory_of
from featx.ir.operator_facts import facts_of
from featx.tracing.environment.generators import SharedGenerators, TorchGenerator
from featx.tracing.environment.thread_modes import FunctionMode, ThreadModes
from featx.tracing.inputs.model_call import as_given
from featx.tracing.model_state.module_state import ModuleState, parts_of, replaced_part
from featx.tracing.nodes.scope import asked_for_by
from featx.tracing.objects.module_tree import registered_tensors, tensors_of
from featx.tracing.objects.structure import copy_structure
from featx.tracing.replica.interception import intercept
from featx.tracing.replica.model_context import ModelContext, ModelTensors
from featx.tracing.replica.replica import Replica
from featx.tracing.side_effects.foreign_tensors import ForeignTensors
from featx.tracing.stand_ins.kernels import Kernels

SETS_HOOKS = "may register a hook for the gradients of a requested value"


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


class FullRun(NamedTuple):
    """What a run from the start of forward to its end has done.

    Attributes:
        written: the paths of tensors that it has written or replaced.
        replaced: the paths of parameters and buffers for which a module holds another tensor now, or none.
        writes: how many kernels have written the memory of each tensor of the model, by path.
        calls: how many calls it made of which the output is that of a module, by the paths of modules.
        runs: how often each module ran, by path.
        changed: the attributes of modules that hold something else than before, each by the path of its module.
        gradients: what it does with gradients, for a message: it sets hooks for those of tensors, or calls backward.
        has_failed: whether forward has raised an error, so that what it does after that is not known.
    """

    written: list[str]
    replaced: set[str]
    writes: Counter[str]
    calls: Counter[str]
    runs: Counter[str]
    changed: set[tuple[str, str]]
    gradients: str | None
    has_failed: bool


def run_to_the_end(
    context: ModelContext,
    replica: Replica,
    tensors: ModelTensors,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    read: Mapping[str, str],
    called: Collection[str],
    *,
    skips_convolutions: bool,
) -> FullRun:
    """Run a replica for real, with nothing recorded, and see what it writes and calls. The replica is used up.

    Args:
        context: what is known of the model.
        replica: a copy of the model with tensors of its own.
        tensors: these tensors.
        args: positional inputs.
        kwargs: inputs by name.
        read: the paths of the tensors that count, each with that of a module whose own calls may write it, so that only
            what is written after the last one counts; "" for none.
        called: the paths of the modules whose calls are counted.
        skips_convolutions: as for `run_plainly`. What forward does then depends on values that are as arbitrary as
            those of guessed inputs.
    """
    root = replica.root
    registered = dict(registered_tensors(root))
    tensors_read = {path: tensor for path, tensor in registered.items() if path in read}
    states = {path: _state_of(tensor) for path, tensor in tensors_read.items()}
    of_readers: dict[str, list[str]] = {}
    for path in tensors_read:
        of_readers.setdefault(read[path], []).append(path)
    calls, runs = Counter[str](), Counter[str]()
    outer: list[str] = []

    def count(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = replica.paths[module]
        calls.update(asked_for_by(path, called, outer))
        runs[path] += 1
        outer.append(path)
        try:
            return forward(*args, **kwargs)
        finally:
            outer.pop()
            for own in of_readers.get(path, ()) if path else ():
                states[own] = _state_of(tensors_read[own])

    attributes = _Attributes(replica.paths)
    intercept(replica.paths, count)
    gradients = _UsesOfGradients()
    memories, writes = tensors.memories_by_path(), Counter[int]()
    run = run_plainly(
        context,
        root,
        args,
        kwargs,
        skips_convolutions=skips_convolutions,
        function_mode=FunctionMode(gradients.on_call),
        on_write=lambda tensors: writes.update(set(map(memory_of, tensors))),
    )
    after = dict(registered_tensors(root))
    replaced = {path for path, tensor in registered.items() if after.get(path) is not tensor}
    written = [path for path, tensor in tensors_read.items() if path in replaced or _state_of(tensor) != states[path]]
    of_paths = Counter({path: writes[memory] for path, memory in memories.items()})
    has_failed = run.error is not None
    return FullRun(written, replaced, of_paths, calls, runs, attributes.changed(), gradients.found, has_failed)


class _Attributes:
    """The attributes and parts of modules, by path, as they are when this is made. O(attributes)."""

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self._before = [(path, module, ModuleState(module), parts_of(module)) for module, path in paths.items()]

    def changed(self) -> set[tuple[str, str]]:
        """Return those that hold something else now, each by the path of its module."""
        found: set[tuple[str, str]] = set()
        for path, module, state, parts in self._before:
            found.update((path, place.name) for place, _ in state.assigned_values())
            replaced = replaced_part(module, parts)
            if replaced is not None:
                found.add((path, replaced))
        return found


class _UsesOfGradients:
    """Notes whether a model sets hooks for gradients, or changes the gradients of its parameters."""

    def __init__(self) -> None:
        self.found: str | None = None

    def on_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if facts_of(function.__name__).changes_gradients:
            self.found = SETS_HOOKS
        elif function.__name__ == "backward":
            self.found = "calls backward, which adds to the gradients of the model's parameters"
        return function(*args, **kwargs)


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what is another one when a tensor has been written by torch, or was given other memory."""
    return tensor._version, memory_of(tensor)
