"""What forward has left on the modules of a replica, against what a graph of it would leave there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn

from featx.ir.torch_layers import is_torch_layer
from featx.tracing.history.noted_set import NotedSet
from featx.tracing.model_state.attribute_changes import AttributeChanges
from featx.tracing.model_state.module_state import AttributePath, Parts, parts_of, plain_attributes, replaced_part
from featx.tracing.objects.module_parts import forward_of, has_forward_hooks
from featx.tracing.objects.python_state import PythonState
from featx.tracing.objects.references import referred_to
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.mode_reads import mode_of
from featx.tracing.side_effects.forward_side_effects import computed_attributes, unsupported_side_effect
from featx.tracing.side_effects.left import Left
from featx.tracing.signals import ModifiedFromOutside, ReadOrderUnknown, UnsupportedSideEffect
from featx.tracing.source.attributes import names_read_in
from featx.tracing.source.frames import is_library_code

# With which code may read any attribute.
_READ_ANY = frozenset({"getattr", "vars", "__dict__", "attrgetter", "eval", "exec"})
# The path of a module, and the name of an attribute of it.
Attribute = tuple[str, str]
# A module, and its parts.
_Child = tuple[nn.Module, Parts]


class StateChecks:
    """Compares the modules of a replica with what they were, when a module has run and when the trace is over.

    Args:
        recorder: knows where values come from.
        check_calls: raises if a torch call did something that a graph would miss.
        paths: the modules of the replica, and their paths; an attribute too.
        earlier: what an earlier call of them found.
        is_requested: says of a path whether something inside of the module there is asked for.

    Attributes:
        states: what the modules were like at the start, and after their last calls.
        training: the modes of the modules at the start.
        opened_modules: the modules that were traced through, without an end in the middle.
        opaque_paths: the paths of those that were one node.
        absent: attributes that are not there during this trace.
        read_first: those that forward reads before it assigns them.
        stored_are_read: whether code reads attributes that its source did not show it to read.
        left: attributes of opened modules that hold what forward has computed, and globals that do.
        cache_message: what forward has left on an opened module, and may be a cache; a second call tells.
        kept_input_message: what forward has kept of its inputs in a container, where a next call may find it.
    """

    def __init__(
        self, recorder: Recorder, check_calls: Callable[[], None], paths: Mapping[nn.Module, str],
        earlier: AttributeChanges | None, is_requested: Callable[[str], bool],
    ) -> None:  # fmt: skip
        self._recorder = recorder
        self._check_calls = check_calls
        self.paths = paths
        self.states = AttributeChanges(paths, earlier)
        self.training = {module: mode_of(module) for module in paths}
        self.opened_modules = NotedSet[nn.Module]()
        self.opaque_paths = NotedSet[str]()
        self.absent: set[Attribute] = set()
        self.read_first: set[Attribute] = set()
        self.stored_are_read = False
        self.left = NotedSet[Left]()
        self.cache_message: str | None = None
        self.kept_input_message: str | None = None
        self._is_requested, self._cannot_be_whole = is_requested, set[str]()
        # The modules that are being traced through, and those that were, and whose forward has changed attributes.
        self._in_progress: list[nn.Module] = [next(iter(paths))]
        self._changed = NotedSet[nn.Module]()

    def mark(self) -> tuple[Any, ...]:
        """Return what `forget` needs to take back everything from now on; `states` has marks of its own."""
        return tuple(each.mark() for each in self._noted), self.cache_message, self.kept_input_message

    def forget(self, mark: tuple[Any, ...]) -> None:
        """Take back what was noted since `mark`."""
        marks, self.cache_message, self.kept_input_message = mark
        for noted, its_mark in zip(self._noted, marks, strict=True):
            noted.forget(its_mark)

    @property
    def _noted(self) -> tuple[NotedSet[Any], ...]:
        return self.opened_modules, self.opaque_paths, self.left, self._changed

    @property
    def has_changed(self) -> bool:
        """Whether the forward of an opened module has changed attributes, or what they hold."""
        return bool(self._changed) or self.cache_message is not None

    def note_opaque_call(self, module: nn.Module, path: str, *, needs_measuring: bool) -> None:
        """Take note that a module was called as one node. `needs_measuring` is as for `OneNodeChecks.check`."""
        self.opaque_paths.add(path)
        if needs_measuring:
            self.states.note_call(module)

    def note_changed_outside(self, path: str) -> None:
        """Take note that code around a module has changed what its forward reads: a graph that calls it would not."""
        self._cannot_be_whole.add(path)

    def must_open(self, path: str) -> bool:
        """Say whether the module at a path cannot be kept whole instead."""
        return path in self._cannot_be_whole or self._is_requested(path)

    def check_untouched(self, module: nn.Module, path: str) -> None:
        """Raise where code around a module that is kept whole has changed attributes of it."""
        name = self.states.changed_by_others(module)
        if name is not None:
            raise ModifiedFromOutside(
                f"forward changes the attribute '{name}' of or inside '{path}', which is kept whole,"
            )

    def check_no_shared_plain_values(self, module: nn.Module, path: str) -> None:
        """Raise where code around a module that is kept whole may put plain values where it reads them."""
        name = self.states.noted_by_opened(module)
        if name is not None:
            raise ModifiedFromOutside(
                f"forward puts a number or text into '{name}', which '{path}' has too, and '{path}' is kept whole,"
            )

    @contextmanager
    def in_progress(self, module: nn.Module) -> Generator[None]:
        """Take note that a module is being traced through."""
        self._in_progress.append(module)
        try:
            yield
        finally:
            self._in_progress.pop()

    def check_references(self, module: nn.Module, path: str) -> None:
        """Raise where a module that is kept whole has a way to one that is not, and whose forward has changed it.

        A graph does not set `parent.mask`, which a child may read by `self.parent().mask`.
        """
        changed = [each for each in self._changed if self.states.changed_attribute(each) is not None]
        changed += [each for each in self._in_progress if self.states.changed_attribute(each) is not None]
        for owner in referred_to([module], changed) if changed else ():
            raise ModifiedFromOutside(
                f"forward changes the attribute '{self.states.changed_attribute(owner)}' of '{self.paths[owner]}', "
                f"which '{path}' may read, and '{path}' is kept whole,"
            )

    def children_of(self, module: nn.Module) -> list[_Child]:
        """Return what the children of a module are like now, for `check_children`. O(children)."""
        children = [child for child in module._modules.values() if child is not None and child in self.paths]
        return [(child, parts_of(child)) for child in children]

    def check_children(self, before: list[_Child], *, were_changed: bool) -> None:
        """Raise where forward has changed children, as WeightDrop does, and has not put that back. O(children).

        Their own calls may change them, if these are one node. `were_changed` says that others have changed attributes.
        """
        for child, parts in before:
            replaced = self.states.replaced_part(child)
            if replaced is not None and replaced_part(child, parts) is not None:
                raise UnsupportedSideEffect(f"forward replaces '{replaced}' of '{self.paths[child]}',")
            is_layer = not were_changed and self.states.initial(child) is None
            name = self.states.changed_attribute(child) if is_layer else None
            if name is not None:
                raise UnsupportedSideEffect(
                    f"forward changes the attribute '{name}' of '{self.paths[child]}', a layer of torch,"
                )

    def check(self, module: nn.Module, *, is_called: bool = True) -> None:
        """Raise where forward left something on an opened module, or on one of which it called methods alone."""
        path = self.paths[module]
        self._check_mode(module, path)
        self._check_calls()
        state = self.states.initial(module)
        with torch._C.DisableTorchFunction():
            left = (
                None
                if state is None
                else unsupported_side_effect(self, self._recorder, module, state, is_called=is_called)
            )
        if left is not None:
            raise UnsupportedSideEffect(left)
        if state is None:
            self._check_layer(module, path)
            return
        self._recorder.hooks.check_read([module], self.opaque_paths)
        if state.difference() is not None:
            self._changed.add(module)
            self._note_left(path, computed_attributes(self._recorder, state))
            self._note_left(path, state.assigned_constants())

    def check_all(self) -> None:
        """Raise where a module is not what its own calls, or a graph of them, leave it."""
        self._recorder.numbers.arrays.check()
        ran_whole = self._paths_that_ran_whole()
        untouched: set[str] = set()  # parents come first, and are compared with all that is inside of them
        for module, path in self.paths.items():
            if path.rpartition(".")[0] in untouched:
                untouched.add(path)
            replaced = self.states.replaced_part(module)
            if replaced is not None:
                raise UnsupportedSideEffect(
                    f"forward replaces '{replaced}' of '{path}', and a graph does not: do it in __init__, or call the "
                    "model once before,"
                )
            if module in self.opened_modules or path not in ran_whole:
                self.check(module, is_called=self._was_called(module))
            elif self.states.initial(module) is None:
                self._check_mode(module, path)
                self._check_layer(module, path)
            elif path not in untouched and self.opened_modules.isdisjoint(module._modules.values()):
                self.check_untouched(module, path)
                untouched.add(path)
        self._check_references_to_uncalled()

    def _check_references_to_uncalled(self) -> None:
        """Raise where a module that is kept whole has a way to one that others have changed and that is not called."""
        changed = [module for module in self._changed if not self._was_called(module)]
        whole = [module for module, path in self.paths.items() if path in self.opaque_paths] if changed else []
        for owner in referred_to(whole, changed):
            raise UnsupportedSideEffect(
                f"forward changes the attribute '{self.states.changed_attribute(owner)}' of '{self.paths[owner]}', "
                "which a module that is kept whole may read,"
            )

    def _paths_that_ran_whole(self) -> set[str]:
        """Return the paths of the modules that were called whole, and of those inside them.

        Not those of which only methods were called: these are code of their callers.
        """
        ran_whole: set[str] = set()
        for path in self.paths.values():  # parents come first
            if path in self.opaque_paths or path.rpartition(".")[0] in ran_whole:
                ran_whole.add(path)
        return ran_whole

    def python_states(self, objects: Iterable[Any]) -> dict[str, Any]:
        """Describe the Python objects that opened modules hold, by path; those of a file are described with the root.

        What a module that is kept whole holds is left out: its own call will change that when the graph runs.

        Args:
            objects: iterators of the model's files, and states of other objects in these.
        """
        state, ran_whole = PythonState(), self._paths_that_ran_whole()
        for module, path in self.paths.items():
            if path in ran_whole and module not in self.opened_modules:
                state.of(plain_attributes(module))
        described = {
            path: state.of(self._kept_attributes(module))
            for module, path in self.paths.items()
            if path not in ran_whole
        }
        described[""] = (described.get(""), *map(state.of, objects))
        return described

    def _kept_attributes(self, module: nn.Module) -> dict[str, Any]:
        """Return the attributes of a module that code of the model may read: all but those that it only stores."""
        attributes, state = plain_attributes(module), self.states.initial(module)
        changed = () if state is None else (*state.changed_values(), *state.grown_containers())
        stored = {name for name, _ in changed if self.is_only_stored(name)}
        return {name: value for name, value in attributes.items() if name not in stored}

    def only_stored(self) -> list[tuple[nn.Module, str]]:
        """Return the attributes that the call has changed and nothing is taken to read, with their modules."""
        return [
            (module, name)
            for module in self._changed
            for name in sorted(plain_attributes(module).keys() - self._kept_attributes(module).keys())
        ]

    def is_only_stored(self, name: str) -> bool:
        """Say whether the model's code assigns attributes of this name, or adds to what they hold, and reads none.

        `name` is that of an attribute; of what is in a dict or an object the answer is no. The source of what forward
        calls says so, as far as it is found. A further call, in which they cannot be read, tells whether that is so.
        """
        if self.stored_are_read:
            return False
        names = self._names_read
        return names is not None and "." not in name and name not in names

    @functools.cached_property
    def _names_read(self) -> frozenset[str] | None:
        """The names of attributes that code of the model reads; None where hooks or functions in attributes may."""
        own = [module for module in self.paths if not is_torch_layer(type(module))]
        if any(map(has_forward_hooks, self.paths)) or any(map(_holds_function, own)):
            return None
        forwards = {(forward_of(module), type(module)) for module in own}
        if not all(inspect.isfunction(forward) for forward, _ in forwards):
            return None
        names = frozenset[str]().union(*(names_read_in(forward, kind) for forward, kind in forwards))
        return names if names.isdisjoint(_READ_ANY) else None

    def _check_mode(self, module: nn.Module, path: str) -> None:
        if mode_of(module) is not self.training[module]:
            raise UnsupportedSideEffect(f"forward switches '{path}' between train and eval mode")

    def _check_layer(self, module: nn.Module, path: str) -> None:
        name = self.states.changed_attribute(module)
        if name is not None:
            raise UnsupportedSideEffect(f"forward changes the attribute '{name}' of '{path}', a layer of torch,")

    def _was_called(self, module: nn.Module) -> bool:
        return module in self.opened_modules or self.paths[module] in self.opaque_paths

    def is_held_by_opened(self, container: object) -> bool:
        """Say whether a module that cannot be kept whole has `container` too, as one config for all modules."""
        states = [self.states.initial(module) for module, path in self.paths.items() if self.must_open(path)]
        held = [state.containers() for state in states if state is not None]
        return any(each is container for containers in held for _, each in containers)

    def note_cache(self, path: str, message: str, places: Iterable[AttributePath]) -> None:
        """Take note that forward has left something on an opened module that may be a cache."""
        self.cache_message = message
        self._note_left(path, places)

    def _note_left(self, path: str, places: Iterable[AttributePath]) -> None:
        self.left.update(Left(path, text, name) for name, text in places)

    def require_read_order(self, attribute: Attribute) -> bool:
        """Say whether forward reads an attribute before it assigns it; if that is not known, let the run start again.

        Raises:
            ReadOrderUnknown: that is not known; a trace without the attribute will tell.
        """
        if attribute in self.absent:
            return False
        if attribute not in self.read_first:
            raise ReadOrderUnknown(*attribute)
        return True


def _holds_function(module: nn.Module) -> bool:
    """Say whether an attribute of a module is a function of the user's, which nothing says what it reads."""
    values = plain_attributes(module).values()
    return any(
        isinstance(value, functools.partial)
        or (isinstance(value, FunctionType) and not is_library_code(value.__code__))
        for value in values
    )
