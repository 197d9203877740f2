"""Pass-throughs, which replace functions in the globals of Python modules and in closures during a trace."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from threading import get_ident
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

import torch

from featx.rebuilding import contents_of_cell
from featx.tracing.environment.autocast_state import AUTOCAST_QUERIES
from featx.tracing.file_globals.legacy_constructors import LEGACY_CONSTRUCTORS, construct, is_called
from featx.tracing.nodes.proxy import find_proxy
from featx.tracing.objects.arrays import is_array_of_numbers
from featx.tracing.objects.replaced_globals import ReplacedGlobal, original_of

FunctionCallHandler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ClosureVariable:
    """A variable of a closure, as a namespace in which it is the only name."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __contains__(self, name: str) -> bool:
        return True

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value

    def get(self, name: str, default: Any = None) -> Any:
        """Return its value, or `default` where it has none."""
        return contents_of_cell(self._cell, default)


# A name in a namespace.
GlobalName = tuple[dict[str, Any], str]
Namespace = dict[str, Any] | ClosureVariable
# A variable that a pass-through may replace: in a namespace, or of a closure.
NamespaceVariable = tuple[Namespace, str]


class _PassThrough(ReplacedGlobal):
    """Stands in for `function` under a global name; as a callable it looks like it.

    Threads that trace share it. Each has an entry in `handlers` for as long as it traces: what answers its calls in
    place of the function, or None. The calls of all other threads go to the function.
    """

    __slots__ = ("handlers", "is_random", "was_global")

    def __init__(self, function: Callable[..., Any], was_global: bool) -> None:
        super().__init__(function)
        self.is_random = is_random(function)
        self.was_global = was_global
        self.handlers: dict[int, FunctionCallHandler | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = self.handlers.get(get_ident()) if self.handlers else None
        if handler is not None:
            return handler(self.function, args, kwargs)
        proxy = find_proxy((args, kwargs))
        if proxy is None:
            return self.function(*args, **kwargs)
        result = proxy.tracer.create_proxy("call_function", self.function, args, kwargs)
        result.node.meta["is_wrapped"] = True
        return result

    def __getattr__(self, name: str) -> Any:
        if name == "dtype" and (self.function is int or self.function is float) and "numpy" in sys.modules:
            return sys.modules["numpy"].dtype(self.function)  # numpy asks for it at `array.astype(int)`
        return getattr(self.function, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.function)

    def __eq__(self, other: object) -> bool:
        return bool(self.function == original_of(other))

    def __hash__(self) -> int:
        return hash(self.function)


class _Torch(_PassThrough):
    """Stands in for the module torch in a model's globals, so that `torch.zeros(height, 3)` takes traced sizes.

    torch's argument parser wants to see an integer first where sizes are not in a tuple, so they are put into one.
    Constructors such as `torch.FloatTensor` are replaced where they are called, and not where code asks for the class.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in LEGACY_CONSTRUCTORS and self.handlers.get(get_ident()) is not None:
            return partial(construct, value) if is_called(sys._getframe(1)) else value
        if name == "from_numpy" and self.handlers.get(get_ident()) is not None:
            return _share_memory
        handler = self.handlers.get(get_ident()) if name in _INTERCEPTED_NAMES else None
        if handler is not None:
            return _Intercepted(value, handler)
        return partial(_with_sizes_in_a_tuple, value) if name in _FACTORIES else value


class _Autograd(_PassThrough):
    """Stands in for a subclass of `torch.autograd.Function`: its `apply` is one node, so that its `backward` stays."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.function, name)
        if name != "apply":
            return value
        apply = _PassThrough(value, True)
        apply.handlers = self.handlers
        return apply


def _share_memory(array: Any) -> torch.Tensor:
    """Do what `torch.from_numpy` does, by a function whose calls a `TorchFunctionMode` receives."""
    return torch.as_tensor(array, device="cpu") if is_array_of_numbers(array) else torch.from_numpy(array)


def _with_sizes_in_a_tuple(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) > 1 and find_proxy(args) is not None:
        return factory(args, **kwargs)
    return factory(*args, **kwargs)


class _Intercepted:
    """A function of torch, or torch.random, whose calls go to a handler."""

    __slots__ = ("_function", "_handler")

    def __init__(self, function: Any, handler: FunctionCallHandler) -> None:
        self._function = function
        self._handler = handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler(self._function, args, kwargs)

    def __getattr__(self, name: str) -> Any:  # of the Python module torch.random
        value = getattr(self._function, name)
        return _Intercepted(value, self._handler) if answered_as(value) is Answered.SEEDING else value


class Answered(Enum):
    """What a function of torch does whose calls a trace on an example answers."""

    SEEDING = "puts the random generator into another state"
    # Settings that cannot be read back, so that a trace could not compare them.
    SWITCHING = "sets a switch which nothing can read"
    # Among the modes is that of the trace.
    REORDERING = "reorders the modes of the thread"
    MODE_QUERY = "tells in which mode the thread is"
    # No mode of torch sees it, and one of the two may be a tensor of the model.
    SWAPPING = "exchanges what two tensors are"


_FUNCTIONS: dict[Answered, tuple[Callable[..., Any], ...]] = {
    Answered.SEEDING: (torch.manual_seed, torch.seed, torch.set_rng_state, torch.random.fork_rng),
    Answered.SWITCHING: (torch.set_flush_denormal,),
    Answered.REORDERING: (torch.set_default_device,),
    Answered.MODE_QUERY: (*AUTOCAST_QUERIES, torch.is_grad_enabled, torch.is_inference_mode_enabled),
    Answered.SWAPPING: (torch.utils.swap_tensors,),
}  # fmt: skip
_ANSWERED = {id(function): kind for kind, functions in _FUNCTIONS.items() for function in functions}
_INTERCEPTED_NAMES = frozenset(
    {"random", *(function.__name__ for functions in _FUNCTIONS.values() for function in functions)}
)
_FACTORIES = frozenset({"zeros", "ones", "rand", "randn", "empty"})
_METHOD_TYPES = (BuiltinMethodType, MethodType)
_STATE_NAMES = frozenset({"getstate", "setstate", "get_state", "set_state", "seed"})


class PassThroughs:
    """The pass-throughs at `places`, which traces that follow one another lay into the namespaces and lift.

    There is no lock, which an interrupt could leave taken. Of two threads that lay and lift at one place at the same
    time, one may find out at the end that its own were not there all the time; it traces again then.
    """

    def __init__(self, places: Iterable[NamespaceVariable]) -> None:
        self._places = list(places)
        self._made: dict[tuple[int, str], _PassThrough] = {}
        self._thread = 0
        self._installed: list[tuple[Namespace, str, _PassThrough, bool, FunctionCallHandler | None]] = []

    def install(
        self,
        refuse_draw: FunctionCallHandler,
        record: FunctionCallHandler | None = None,
        more: Iterable[GlobalName] = (),
    ) -> None:
        """Put them into the namespaces, for the trace that runs in this thread. O(places).

        Args:
            refuse_draw: takes the calls of functions that draw from a random generator of Python or numpy.
            record: takes all other calls; without it, one with a traced value among its arguments is recorded by the
                tracer of that.
            more: further places.
        """
        thread = self._thread = get_ident()
        self._installed = []
        for namespace, name in (*self._places, *more):
            function = namespace.get(name, getattr(builtins, name, None))
            if function is None:
                continue
            is_there = isinstance(function, _PassThrough)
            entry = function if is_there else self._entry_for(namespace, name, function)
            # A trace inside a trace of this thread comes before it.
            has_outer = thread in entry.handlers
            self._installed.append((namespace, name, entry, has_outer, entry.handlers.get(thread)))
            entry.handlers[thread] = refuse_draw if entry.is_random else record
            if not is_there:
                namespace[name] = entry

    def _entry_for(self, namespace: Namespace, name: str, function: Any) -> _PassThrough:
        key = (id(namespace), name)
        made = self._made.get(key)
        if made is None or made.function is not function:
            made = self._made[key] = _kind_for(function)(function, name in namespace)
        return made

    def are_installed(self) -> bool:
        """Say whether all of them are still in place. O(places)."""
        return all(namespace.get(name) is entry for namespace, name, entry, _, _ in self._installed)

    def uninstall(self) -> None:
        """Take away those that no other thread needs. May be called twice. O(places)."""
        for namespace, name, entry, has_outer, outer in self._installed:
            if has_outer:
                entry.handlers[self._thread] = outer
                continue
            entry.handlers.pop(self._thread, None)
            if not entry.handlers and namespace.get(name) is entry:
                if entry.was_global or isinstance(namespace, ClosureVariable):
                    namespace[name] = entry.function
                else:
                    namespace.pop(name, None)


def answered_as(value: Any) -> Answered | None:
    """Return what a value does, if it is a function of torch whose calls a trace on an example answers.

    `torch.manual_seed` is another function, around the first one, as soon as torch.compile has been loaded.
    """
    found = _ANSWERED.get(id(value))
    if found is None and isinstance(value, FunctionType):
        return _ANSWERED.get(id(getattr(value, "__wrapped__", None)))
    return found


def is_random(value: Any) -> bool:
    """Say whether a value, or what it stands in for, is a function of Python or numpy that draws random numbers."""
    value = original_of(value)
    # The functions of both modules are methods of one hidden generator each.
    owner = getattr(value, "__self__", None) if type(value) in _METHOD_TYPES else None
    return (
        owner is not None and type(owner).__name__ in ("Random", "RandomState") and value.__name__ not in _STATE_NAMES
    )


def _kind_for(function: Any) -> type[_PassThrough]:
    if function is torch:
        return _Torch
    return _Autograd if isinstance(function, type) and issubclass(function, torch.autograd.Function) else _PassThrough
