"""What is known of a model and its Python files, before runs and from them; shared by all runs of a request."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from featx.errors import TraceError
from featx.ir.memory import memory_of
from featx.ir.modules import walk_modules
from featx.libraries import only_collects
from featx.tracing.environment.profile_hook import is_threading_object
from featx.tracing.environment.recursion import nesting_depth_of
from featx.tracing.file_globals.caches import Caches
from featx.tracing.file_globals.holders import Holder, outside_of_files
from featx.tracing.file_globals.outer_values import OuterValues
from featx.tracing.file_globals.pass_through import PassThroughs
from featx.tracing.file_globals.wrapping import find_names_to_replace, globals_of
from featx.tracing.nodes.scope import name_of_traced
from featx.tracing.objects.module_parts import definitions_in, has_forward_hooks, tensors_of
from featx.tracing.replica.interception import has_own_call
from featx.tracing.replica.replica import Replica, replica_of
from featx.tracing.signals import UnsupportedSideEffect
from featx.tracing.source_uses.conversions import converts_by_calls_alone
from featx.tracing.source_uses.later_names import KnownLaterNames
from featx.tracing.stand_ins.known_results import KnownResults
from featx.tree import tensors_in


class ModelContext:
    """The modules and tensors of a model, and the places in its code that get pass-throughs. O(modules + globals).

    Traces of one model that follow one another share it. The model is only read.

    Args:
        root: the module or function that is traced.
        example: its arguments.
        modules: Python modules whose functions are recorded as one node each.
        functions: functions of which the same holds.
        follows_wrapped: whether functions are followed that their Python module has marked with `wrap`.

    Raises:
        TraceError: the module's class does something of its own in `__call__`, or parameters are not initialized.
    """

    def __init__(
        self,
        root: nn.Module | Callable[..., Any],
        example: Any,
        modules: Iterable[ModuleType],
        functions: Iterable[Callable[..., Any]],
        *,
        follows_wrapped: bool = False,
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
        paths = {module: path for path, module in walk_modules(self.root)}
        _refuse_distributed(self.root)
        refuse_uninitialized(self.root)
        refuse_ambiguous(paths)
        self.levels = nesting_depth_of(paths.values())
        # Hooks that only collect count as none: a model whose first call registers them has the same graph before it.
        self.hooked = [
            path for module, path in paths.items() if has_forward_hooks(module) and not only_collects(module)
        ]
        self._tensors = ModelTensors(paths)
        self.device = _device_of(self._tensors.all, example)
        self.kinds = {type(module) for module in paths if type(module).__module__[:9] != "torch.nn."}
        # Functions and classes that are attributes of modules.
        self._held = definitions_in(paths)
        functions_held = [each for each in self._held if isinstance(each, FunctionType)]
        self.namespaces = globals_of(self.function, self.kinds, functions_held)
        self.results = KnownResults()
        self.later_names = KnownLaterNames()
        # The globals in which calls of `int`, `float` and `len` are followed; traces find them out.
        self.converting: list[dict[str, Any]] = []
        places = find_names_to_replace(
            self.namespaces, modules, functions, is_recording=True, follows_marked=follows_wrapped
        )  # fmt: skip
        # Whether sizes are fixed that are looked up as texts; traces find out that it is needed.
        self.fixes_keys = False
        # Whether each module is asked what plain values of the files it has changed; traces find out that it is needed.
        self.checks_plain_values = False
        # Whether draws of type checks are put back; traces find out that it is needed.
        self.puts_back_draws = False
        # Those that calls which are one node have changed in this run: what holds them, and their keys.
        self.plain_values_of_calls: list[tuple[Holder, Any]] = []
        # Caches that earlier calls of the model have filled, by path and name, with what replicas have in their place.
        # None as long as that is not known.
        self.caches_before: Mapping[tuple[str, str], Any] | None = None
        self.caches = Caches(self.namespaces, self.kinds, self._held)
        self.passing = PassThroughs([*places, *self.caches.closures])
        self._outer_values: OuterValues | None = None

    @functools.cached_property
    def memories(self) -> frozenset[int]:
        """The memory of the tensors of the model."""
        return frozenset(map(memory_of, self._tensors.all))

    @functools.cached_property
    def uses_threading(self) -> bool:
        """Whether the files of the model name something of threads or processes."""
        return any(is_threading_object(value) for namespace in self.namespaces for value in namespace.copy().values())

    def follow_all_conversions(self) -> None:
        """Follow `int`, `float` and `len` in all files of the model where that can be done. Parses the files.

        For a model that takes long to run: a run that finds out about one file starts again.
        """
        for namespace in self.namespaces:
            file = namespace.get("__file__")
            is_known = any(namespace is known for known in self.converting)
            if isinstance(file, str) and not is_known and converts_by_calls_alone(file, namespace):
                self.converting.append(namespace)

    def check_plain_values(self) -> None:
        """Raise if the module that runs has changed a plain value of its file since its last call, where asked for.

        Raises:
            UnsupportedSideEffect: it has.
        """
        name = self.caches.changed_plain_value() if self.checks_plain_values else None
        if name is not None:
            raise UnsupportedSideEffect(f"forward changes the value {name} in its Python file or in a class")

    def accept_plain_values(self) -> None:
        """Take note that a call which is one node may have changed plain values: it will do so again."""
        if self.checks_plain_values:
            self.plain_values_of_calls += self.caches.places_of_changed()
            self.caches.accept_plain_values()

    def refresh_caches(self, *, forget_left: bool) -> None:
        """Let `caches` tell what they hold now, before a trace. O(names), and fast where nothing has changed.

        Args:
            forget_left: forget what earlier calls have left there.
        """
        self.plain_values_of_calls.clear()
        if forget_left:
            self.caches.forget_left()
        self.caches.note_threads()
        if not self.caches.are_untouched():
            earlier_caches, self.caches = self.caches, Caches(self.namespaces, self.kinds, self._held)
            self.caches.take_left(earlier_caches)
            if self._outer_values is not None:
                earlier, self._outer_values = self._outer_values, self._new_outer_values()
                self._outer_values.carry_over(earlier)

    def outer_values(self) -> OuterValues:
        """Return what notices values outside of the modules that code sets for a call, for a run that starts."""
        if self._outer_values is None:
            self._outer_values = self._new_outer_values()
        self._outer_values.start()
        return self._outer_values

    def _new_outer_values(self) -> OuterValues:
        return OuterValues([*self.caches.holders, *outside_of_files(self.namespaces)])

    @property
    def name(self) -> str:
        """What messages call the model or function that is traced."""
        return name_of_traced(self.traced)

    def replica(self, training: bool | None, copies_tensors: str) -> tuple[Replica, ModelTensors]:
        """Return a new replica of the model in a mode, and its tensors; see `Replica`. O(modules)."""
        if copies_tensors == "buffers" and self._tensors.share_memory_with_parameters:
            copies_tensors = "all"
        replica = replica_of(self.root, training, copies_tensors, self.caches)
        replica.put_back(self.caches_before or {})
        return replica, self._tensors if replica.has_tensors_of_model else ModelTensors(replica.paths)


class ModelTensors:
    """The parameters, buffers and plain attributes of the modules in `paths`: the tensors, and their paths by id."""

    def __init__(self, paths: dict[nn.Module, str]) -> None:
        self.paths: dict[int, str] = {}
        self.all: list[torch.Tensor] = []
        for owner, prefix in paths.items():
            for name, tensor in tensors_of(owner):
                self.paths.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
                self.all.append(tensor)

    def memories_by_path(self) -> dict[str, int]:
        """Return the memory of each tensor by its path. O(tensors)."""
        return {self.paths[id(tensor)]: memory_of(tensor) for tensor in self.all}

    @functools.cached_property
    def share_memory_with_parameters(self) -> bool:
        """Whether some tensor that is no parameter is memory of one."""
        parameters = {memory_of(tensor) for tensor in self.all if isinstance(tensor, nn.Parameter)}
        return any(memory_of(tensor) in parameters for tensor in self.all if not isinstance(tensor, nn.Parameter))


def refuse_uninitialized(root: nn.Module) -> None:
    """Raise a TraceError where a lazy module has not run yet: its parameters have no shape."""
    for path, module in walk_modules(root):
        if isinstance(module, LazyModuleMixin):
            raise TraceError(
                f"'{path}' is a {type(module).__name__}, whose parameters are not initialized; run the model once on "
                "an input, which gives them their shapes, and trace it then; or take it out of the model, if forward "
                "does not call it"
            )


def _refuse_distributed(root: nn.Module) -> None:
    """Raise a TraceError for a model in DistributedDataParallel, whose forward exchanges gradients and buffers."""
    if isinstance(root, nn.parallel.DistributedDataParallel):
        raise TraceError(
            "the model is in DistributedDataParallel, whose forward talks to other processes; trace what is in it, "
            "`model.module`, and put the result into DistributedDataParallel"
        )


def refuse_ambiguous(paths: Mapping[nn.Module, str]) -> None:
    """Raise a TraceError where two modules have one path."""
    if len(set(paths.values())) < len(paths):
        found: set[str] = set()
        for path in paths.values():
            if path in found:
                raise TraceError(
                    f"two modules have the path '{path}', because the name of one has a dot in it; register it with "
                    "add_module under a name without dots"
                )
            found.add(path)


def _device_of(tensors: list[torch.Tensor], example: Any) -> torch.device:
    if not tensors:
        tensors = tensors_in(example)
    return tensors[0].device if tensors else torch.device("cpu")
