"""Run a copy of a model from the start of forward to its end, and see what it writes, stores and calls on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from featx.ir.memory import memory_of
from featx.ir.operator_facts import facts_of
from featx.tracing.environment.thread_modes import FunctionMode
from featx.tracing.example.plain_run import run_plainly
from featx.tracing.model_state.module_state import ModuleState, parts_of, replaced_part
from featx.tracing.nodes.scope import requested_by
from featx.tracing.objects.module_parts import registered_tensors
from featx.tracing.replica.interception import intercept
from featx.tracing.replica.model_context import ModelContext, ModelTensors
from featx.tracing.replica.replica import Replica

SETS_HOOKS = "may register a hook for the gradients of a requested value"


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
    skips_products: bool,
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
        skips_products: as for `run_plainly`. What forward does then depends on values that are as arbitrary as
            those of guessed inputs.
    """
    state = _TensorStates(replica.root, tensors, read)
    calls = _Calls(replica.paths, called, state.accept)
    attributes, gradients = _Attributes(replica.paths), _UsesOfGradients()
    intercept(replica.paths, calls.on_call)
    run = run_plainly(
        context,
        replica.root,
        args,
        kwargs,
        skips_products=skips_products,
        function_mode=FunctionMode(gradients.on_call),
        on_write=state.on_write,
    )
    return FullRun(
        written=state.written(),
        replaced=state.replaced(),
        writes=state.counts(),
        calls=calls.with_output,
        runs=calls.runs,
        changed=attributes.changed(),
        gradients=gradients.found,
        has_failed=run.error is not None,
    )


class _TensorStates:
    """The parameters and buffers of a model, and what a run does with them.

    Args:
        root: the model.
        tensors: its tensors.
        read: as for `run_to_the_end`.
    """

    def __init__(self, root: nn.Module, tensors: ModelTensors, read: Mapping[str, str]) -> None:
        self._root = root
        self._registered = dict(registered_tensors(root))
        self._states = {path: _state_of(tensor) for path, tensor in self._registered.items() if path in read}
        self._memories, self._writes = tensors.memories_by_path(), Counter[int]()
        self._of_readers: dict[str, list[str]] = {}
        for path in self._states:
            if read[path]:
                self._of_readers.setdefault(read[path], []).append(path)

    def accept(self, reader: str) -> None:
        """Take what a call of the module at this path has written itself as what is there."""
        for path in self._of_readers.get(reader, ()):
            self._states[path] = _state_of(self._registered[path])

    def on_write(self, tensors: list[torch.Tensor]) -> None:
        """Count a kernel that is about to write tensors."""
        self._writes.update(set(map(memory_of, tensors)))

    def replaced(self) -> set[str]:
        """Return the paths at which there is another tensor now, or none."""
        after = dict(registered_tensors(self._root))
        return {path for path, tensor in self._registered.items() if after.get(path) is not tensor}

    def written(self) -> list[str]:
        """Return the paths of those among the tensors that count which were written or replaced."""
        replaced = self.replaced()
        states = self._states.items()
        return [path for path, state in states if path in replaced or _state_of(self._registered[path]) != state]

    def counts(self) -> Counter[str]:
        """Return how many kernels have written the memory of each tensor of the model, by path."""
        return Counter({path: self._writes[memory] for path, memory in self._memories.items()})


class _Calls:
    """Counts the calls of modules.

    Args:
        paths: the modules, with their paths.
        called: as for `run_to_the_end`.
        on_end: is called with the path of a module when a call of it is over.

    Attributes:
        with_output: how many calls had the output of a module, by its path.
        runs: how often each module ran, by path.
    """

    def __init__(self, paths: Mapping[nn.Module, str], called: Collection[str], on_end: Callable[[str], None]) -> None:
        self.with_output, self.runs = Counter[str](), Counter[str]()
        self._paths, self._called, self._on_end = paths, called, on_end
        self._outer: list[str] = []

    def on_call(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        path = self._paths[module]
        self.with_output.update(requested_by(path, self._called, self._outer))
        self.runs[path] += 1
        self._outer.append(path)
        try:
            return forward(*args, **kwargs)
        finally:
            self._outer.pop()
            self._on_end(path)


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
