"""What a trace on an example knows of a model, and of the Python around it, before it starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from featx.errors import TraceError
from featx.tracing.constants import memory_of, tensors_of
from featx.tracing.missed_writes import MissedWrites
from featx.tracing.scope import has_hooks, has_own_call, walk_modules
from featx.tracing.wrapping import find_places, globals_of
from featx.tree import tree_leaves


class Surroundings:
    """The modules and tensors of a model, and the places in its code where a trace listens. O(modules + globals).

    Traces of one model that follow one another share it.

    Args:
        root: the module or function that is traced.
        example: its arguments.
        modules: Python modules whose functions are recorded as one node each.
        functions: functions of which the same holds.

    Raises:
        TraceError: the module's class does something of its own in `__call__`.
    """

    def __init__(
        self,
        root: nn.Module | Callable[..., Any],
        example: Any,
        modules: Iterable[ModuleType],
        functions: Iterable[Callable[..., Any]],
    ) -> None:
        self.traced = root
        # What owns the modules and tensors.
        self.root = root if isinstance(root, nn.Module) else nn.Module()
        if has_own_call(type(self.root)):
            raise TraceError(
                f"{type(root).__name__} overrides __call__, which a graph of its forward would leave out; put that "
                "code into forward, or make the model a submodule of one that calls it"
            )
        self.function: Callable[..., Any] = root.forward if isinstance(root, nn.Module) else root
        self.signature = inspect.signature(self.function)
        self.module_paths = {module: path for path, module in walk_modules(self.root)}
        self.hooked = [path for module, path in self.module_paths.items() if has_hooks(module)]
        # The paths of the tensors of the model, by id, and the tensors.
        self.tensor_paths: dict[int, str] = {}
        self.tensors: list[torch.Tensor] = []
        for owner, prefix in self.module_paths.items():
            for name, tensor in tensors_of(owner):
                self.tensor_paths.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
                self.tensors.append(tensor)
        self.device = _device_of(self.tensors, example)
        self.kinds = {type(module) for module in self.module_paths if type(module).__module__[:9] != "torch.nn."}
        self.namespaces = globals_of(self.function, self.kinds)
        # The tensors that the model's code names as globals, by their memory.
        self.global_tensors: dict[int, list[torch.Tensor]] = {}
        for namespace in self.namespaces:
            for value in list(namespace.values()):
                if type(value) is torch.Tensor:
                    self.global_tensors.setdefault(memory_of(value), []).append(value)
        # By class of modules, the attributes that its forward assigns to other objects; traces find them out.
        self.assigned_to_others: dict[type, frozenset[str]] = {}
        self.missed_writes = MissedWrites()
        self.places = find_places(self.namespaces, modules, functions, is_recording=True)


def _device_of(tensors: list[torch.Tensor], example: Any) -> torch.device:
    if not tensors:
        tensors = [value for value in tree_leaves(example) if isinstance(value, torch.Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
