"""Keep a trace out of the caches and counters that a model's code has outside its modules.

Functions cached by size, dicts and lists of a Python module or a class, default arguments and variables of closures
live on after the trace; a tensor without values that stayed in one would break the model for good, and a call that was
counted would change what it does next.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch

from featx.libraries import is_logging
from featx.rebuilding import contents_of_cell
from featx.tracing.environment.other_threads import OtherThreads
from featx.tracing.environment.restorers import run_restorers
from featx.tracing.file_globals.holders import ContextValue, Defaults, Holder, Variable
from featx.tracing.file_globals.kept_iterators import KeptIterators
from featx.tracing.file_globals.object_states import ObjectState, has_own_state, is_counter, states_of_objects
from featx.tracing.file_globals.pass_through import ClosureVariable, NamespaceVariable
from featx.tracing.file_globals.wrapping import each_once, globals_named
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.nodes.proxy import Proxy
from featx.tracing.objects.containers import DEPTH_IN_MODULES, SlotAttributes, containers_in
from featx.tracing.objects.plain_objects import has_defaults
from featx.tracing.objects.replaced_globals import original_of
from featx.tree import tensors_in

_CACHED = functools._lru_cache_wrapper
# How deep in the result of a cached function a tensor may lie.
_NESTING = 3
_METHODS = (MethodType, staticmethod, classmethod)


class Caches:
    """The caches that `namespaces` (globals of Python modules) and `kinds` (classes) name, and classes that are `held`.

    `restore` puts them back: a cached function that was called with something new is emptied, and containers and plain
    objects hold again what they held where a plain value (a number, a text, None or a tuple of such) changed, or where
    a tensor of the trace came in; what other threads may have added stays. Arrays, counters and generators of random
    numbers are set back; from `keep_iterators` on, no other iterator can be advanced. A second call that is compared
    with the first one finds there what that has left (`put_left`).
    O(names).
    """

    def __init__(
        self, namespaces: Iterable[dict[str, Any]], kinds: Iterable[type], held: Iterable[FunctionType | type] = ()
    ) -> None:
        found = _Names(namespaces, kinds, held)
        # The ids of the globals and classes.
        self.namespaces = found.namespaces
        # Closures in which a decorator keeps a cached function.
        self.closures = found.closures
        self._functions = {id(each): (each, each.cache_info().misses) for each in found.cached}
        self.holders = [*map(Holder, found.owners), *map(Variable, found.variables)]
        # What calls have left of their tensors, in which holder, and the ids of those tensors.
        self._left: list[tuple[Holder, dict[Any, Any]]] = []
        self._left_tensors: set[int] = set()
        # Their place in a global, a class, a default or a closure is no part of a replica.
        values = map(original_of, found.values)
        self._iterators = [value for value in values if isinstance(value, Iterator) and not is_counter(value)]
        self.holders += map(Defaults, found.with_defaults)
        self.holders += [ContextValue(value) for value in found.values if isinstance(value, ContextVar)]
        self.holders += map(Holder, containers_in(found.values, DEPTH_IN_MODULES))
        self._states = states_of_objects(self.holders)
        # A run has a context of its own: what it finds in one is not put there and back.
        self._kept_iterators = KeptIterators(each for each in self.holders if not isinstance(each, ContextValue))
        # The states in which calls before this was made have left objects.
        self._states_left: list[ObjectState] = []
        self.note_threads()

    def note_threads(self) -> None:
        """Take note that a run starts: what other threads add to containers from now on stays there."""
        self._threads = OtherThreads()

    def keep_iterators(self) -> None:
        """Refuse that this thread advances an iterator, until `restore`. O(iterators)."""
        self._kept_iterators.replace()

    def take_left(self, earlier: Caches) -> None:
        """Take over what calls have left, which `earlier`, of the same names, has put away."""
        self._left, self._left_tensors = earlier._left, earlier._left_tensors
        self._states_left = [state for state in (*earlier._states_left, *earlier._states) if state.has_changed]

    @property
    def containers(self) -> frozenset[int]:
        """The ids of the containers, arrays and the like that it looks after; of an object its attributes, or slots."""
        values = (holder.value for holder in self.holders)
        containers = {id(each.owner if type(each) is SlotAttributes else each) for each in values}
        return frozenset(containers.union(id(state.value) for state in self._states if state.value is not None))

    def objects(self) -> list[Any]:
        """Return the iterators, which runs may have advanced, and what runs have left in place of other objects.

        Tensors and sizes at new places are left out: a list that collects features grows with each call.
        """
        states = (state.left for state in self._states if state.has_changed)
        left = ((holder, item) for holder, items in self._left for item in items.items())
        is_collected = functools.partial(_holds_of_trace, lambda _: True)
        objects = ((key, value) for holder, (key, value) in left if holder.had(key) or not is_collected(value))
        return [*self._iterators, *states, *objects]

    def objects_now(self) -> list[Any]:
        """Do as `objects`, for what a run has left that nobody has put back yet. O(names)."""
        changed = (holder.replaced(holder.now()) for holder in self.holders if not holder.is_untouched())
        return [*self.objects(), *changed]

    def watch(self, value: Any) -> None:
        """Look after the containers in the result of a cached function too, which is the same at each call."""
        self.holders += map(Holder, containers_in((value,)))

    def changed_plain_value(self) -> str | None:
        """Say which plain value the code has changed, by its key or name; None where there is none."""
        return next((repr(key) for _, key in self.places_of_changed()), None)

    def places_of_changed(self) -> Iterator[tuple[Holder, Any]]:
        """Yield where the plain values are that the code has changed: what holds them, and their keys or names."""
        return ((holder, key) for holder in self.holders for key in holder.changed_plain_values())

    def accept_plain_values(self) -> None:
        """Take plain values as they are now for unchanged: a call that is one node has changed them, and will again."""
        for holder in self.holders:
            holder.accept_plain_values()

    def are_untouched(self) -> bool:
        """Say whether all of them are as they were, so that this may serve another trace. O(names), and fast."""
        return all(function.cache_info().misses == misses for function, misses in self._functions.values()) and all(
            holder.is_untouched() for holder in self.holders
        )

    def restore(self, is_of_trace: Callable[[torch.Tensor], bool]) -> None:
        """Empty functions and put back what was there. May be called twice.

        Args:
            is_of_trace: says whether a tensor is one that the trace has made.
        """

        def is_of_call(tensor: torch.Tensor) -> bool:
            return id(tensor) in self._left_tensors or is_of_trace(tensor)

        holds_of_call = functools.partial(_holds_of_trace, is_of_call)
        restorers: list[Callable[[], object]] = [self._kept_iterators.put_back]
        restorers += [state.restore for state in self._states]
        restorers.append(self._empty_functions)
        restore = functools.partial(self._restore_holder, holds_of_call, self._threads.have_run())
        restorers += [functools.partial(restore, holder) for holder in self.holders]
        run_restorers(restorers[::-1])

    def _empty_functions(self) -> None:
        for key, (function, misses) in self._functions.items():
            if function.cache_info().misses != misses:
                function.cache_clear()
                self._functions[key] = (function, 0)

    def _restore_holder(self, holds_of_call: Callable[[Any], bool], keeps_added: bool, holder: Holder) -> None:
        left = holder.restore(holds_of_call, keeps_added=keeps_added)
        if left:
            self._left.append((holder, left))
            self._left_tensors.update(id(leaf) for leaf in tensors_in(left))

    def put_left(self) -> None:
        """Put back what calls have left, for the next call on their replica; `restore` takes what that has left."""
        put_back, self._left = self._left, []
        for holder, left in put_back:
            holder.put(left)
        for state in (*self._states_left, *self._states):
            state.put_left()

    def names_left(self, is_computed: Callable[[torch.Tensor], bool]) -> list[str]:
        """Return the keys and names under which calls have left traced numbers, or tensors that are computed so."""
        return [
            f"{key!r} in the model's Python file"
            for _, left in self._left
            for key, item in left.items()
            if _holds_of_trace(is_computed, item)
        ]

    def forget_left(self) -> None:
        """Forget what calls have left: a call on another replica follows."""
        self._left, self._left_tensors, self._states_left = [], set(), []
        for state in self._states:
            state.forget_left()


class _Names:
    """What globals and classes name, and what the functions among that hold; classes that attributes hold. O(names).

    Attributes:
        namespaces: the ids of the globals, and of the members of the classes of modules.
        owners: the globals, those classes, and the other classes in the files that have values.
        cached: cached functions.
        closures: the variables of closures that hold one, with their names.
        variables: other variables of closures, by name.
        with_defaults: functions one of whose defaults has a state of its own.
        values: what is neither a function nor a class.
    """

    def __init__(
        self, namespaces: Iterable[dict[str, Any]], kinds: Iterable[type], held: Iterable[FunctionType | type]
    ) -> None:
        self.namespaces: set[int] = set()
        self.owners: list[Any] = []
        self.cached: list[Any] = []
        self.closures: list[NamespaceVariable] = []
        self.variables: list[tuple[str, CellType]] = []
        self.with_defaults: list[FunctionType] = []
        self.values: list[Any] = []
        self._functions: list[FunctionType] = []
        bases = {base for kind in kinds for base in kind.__mro__}
        self._classes = {id(base) for base in bases}
        classes = {id(members): (base, members) for base, members in ((base, dict(vars(base))) for base in bases)}
        for namespace in _own_code([*namespaces, *(members for _, members in classes.values())]):
            self.namespaces.add(id(namespace))
            self.owners.append(classes[id(namespace)][0] if id(namespace) in classes else namespace)
            for name, value in namespace.copy().items():  # at once: other threads may add names meanwhile
                self._note(name, value, namespace)
        for function in _with_functions_inside(self._functions):
            self._note_held(function)
        values: list[Any] = list(held)
        functions = _with_functions_inside(each for each in values if isinstance(each, FunctionType))
        values += [contents_of_cell(cell) for function in functions for cell in function.__closure__ or ()]
        for value in values:
            self._note_class(value)

    def _note(self, name: str, value: Any, namespace: dict[str, Any]) -> None:
        if type(value) in _METHODS:
            value = value.__func__
        elif type(value) is property:
            value = value.fget
        if isinstance(value, _CACHED):
            if not is_logging(value):  # which would repeat what it is to say once
                self.cached.append(value)
        elif isinstance(value, FunctionType):
            self._functions.append(value)
        elif isinstance(value, type):
            if value.__module__ == _name_of(namespace):
                self._note_class(value)
        elif not name.startswith("__"):
            self.values.append(value)

    def _note_class(self, value: object) -> None:
        if not isinstance(value, type) or id(value) in self._classes:
            return
        if not _is_of_library(value) and has_defaults(value):
            self._classes.add(id(value))
            self.owners.append(value)
            self.values += [item for key, item in dict(vars(value)).items() if not key.startswith("__")]

    def _note_held(self, function: FunctionType) -> None:
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            value = original_of(contents_of_cell(cell))
            if isinstance(value, _CACHED) and not is_logging(value):
                self.cached.append(value)
                self.closures.append((ClosureVariable(cell), name))
            else:
                self.variables.append((name, cell))
        by_name = function.__kwdefaults__ or {}
        self.values += [*(function.__defaults__ or ()), *by_name.values()]
        if any(map(has_own_state, function.__defaults__ or ())):
            self.with_defaults.append(function)
        if any(map(has_own_state, by_name.values())):
            self.owners.append(by_name)
        if function.__dict__ or function.__name__ in function.__code__.co_names:  # it may set attributes of its own
            self.values.append(function.__dict__)
        for value in map(contents_of_cell, cells):
            self._note_class(value)
            self.values.append(value)


def _holds_of_trace(is_of_trace: Callable[[torch.Tensor], bool], value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_of_trace(is_of_trace, item) for item in cast(list[Any], value))
    if issubclass(type(value), (TracedNumber, Proxy)):  # a proxy would be asked what it is by isinstance
        return True
    return isinstance(value, torch.Tensor) and is_of_trace(value)


def empty_functions_that_keep(tensors: list[torch.Tensor]) -> None:
    """Empty the cached functions, of whatever file, that keep one of `tensors`, also inside tuples, lists and dicts.

    Costs nothing where there are no tensors, and where there are, up to three walks over all objects of the process.
    `tensors` is emptied.
    """
    for _ in range(_NESTING):
        if not tensors:
            return
        holders = [each for each in gc.get_referrers(*tensors) if each is not tensors]
        for holder in holders:
            if isinstance(holder, _CACHED):
                holder.cache_clear()
        # One list alone, which does not count as one that keeps them.
        tensors[:] = filter(_may_be_cached, holders)
        del holders
    tensors.clear()


def _may_be_cached(holder: object) -> bool:
    """Say whether something may be part of the result of a cached function; the names of a Python file are not."""
    return type(holder) in (tuple, list) or (type(holder) is dict and "__builtins__" not in holder)


def _with_functions_inside(functions: Iterable[FunctionType]) -> Iterator[FunctionType]:
    """Yield functions and those that their closures hold, such as what a decorator has wrapped, each once."""
    pending, seen = list(functions), set[int]()
    while pending:
        function = pending.pop()
        if id(function) in seen or _is_of_library(function):
            continue
        seen.add(id(function))
        yield function
        held = map(contents_of_cell, function.__closure__ or ())
        pending += [each for each in held if isinstance(each, FunctionType)]


def _is_of_library(definition: FunctionType | type) -> bool:
    package = str(definition.__module__).partition(".")[0]
    return package in ("torch", "featx") or package in sys.stdlib_module_names


def _own_code(namespaces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the namespaces, and those of functions and Python modules that they name, without torch's and Python's."""
    named = [*globals_named(namespaces, FunctionType), *globals_named(namespaces, ModuleType)]
    found = each_once([*namespaces, *(each for each in named if not _is_of_python(each))])
    return [each for each in found if "__path__" not in each and not _name_of(each).startswith("torch.")]


def _is_of_python(namespace: dict[str, Any]) -> bool:
    return _name_of(namespace).partition(".")[0] in sys.stdlib_module_names


def _name_of(namespace: dict[str, Any]) -> str:
    return str(namespace.get("__name__") or namespace.get("__module__"))
