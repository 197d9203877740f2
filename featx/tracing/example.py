"""ExampleTracer: run `forward` on an example, and record the graph of what it really does.

Tensors stay tensors: every torch call passes through a `TorchFunctionMode`, which runs it on stand-ins without values
and knows a tensor by its identity. Sizes are traced numbers. What Python decides becomes a guard. Where the model asks
for a value, the trace starts again with real tensors.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType, ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from featx.errors import FeatxError, TraceError
from featx.ir.graph import Graph
from featx.tracing.caches import Caches, empty_functions_that_keep
from featx.tracing.calls import LeafPolicy
from featx.tracing.constants import memory_of
from featx.tracing.conversions import CONVERSIONS
from featx.tracing.example_inputs import bind_example
from featx.tracing.frames import compares_objects, line_of, user_frame
from featx.tracing.generators import SharedGenerators
from featx.tracing.grad_modes import gradients_set
from featx.tracing.guards import require_distinct_inputs
from featx.tracing.kept_dicts import KeptDicts
from featx.tracing.lineage import Lineage
from featx.tracing.mode_reads import mode_of
from featx.tracing.pass_through import wrapped
from featx.tracing.recording import NeedsValues
from featx.tracing.saved_state import SavedState
from featx.tracing.scalars import Disguise, larger
from featx.tracing.scope import borrowed, has_hooks
from featx.tracing.standins import StandIns
from featx.tracing.states import ModuleStates
from featx.tracing.surroundings import Surroundings
from featx.tracing.symbolic import is_leaf_class
from featx.tracing.unfollowable import AssignedAnew, Converts, LeftBehind, Unfollowable
from featx.tracing.wrapped_calls import WrappedCalls
from featx.tree import tree_leaves

IsEnough = Callable[[Graph, str], bool]


class ExampleTracer:
    """Traces a module or function on an example.

    Args:
        is_leaf: says, for a module and its path, whether a call of it is one node. By default modules of torch.nn are.
        autowrap_modules: Python modules whose functions are recorded as one node each.
        autowrap_functions: functions that are recorded as one node each.
        opened: the paths of the modules that are traced through; all others are one node each, whatever `is_leaf` says,
            which then only decides how nodes are numbered. By default what `is_leaf` says.
        keep_source: note the line of the model in `node.meta["source"]`.
        keep_output: return what the root returns; otherwise the graph returns None, and the output may be of any kind.
    """

    def __init__(
        self,
        is_leaf: LeafPolicy | None = None,
        autowrap_modules: tuple[ModuleType, ...] = (math,),
        autowrap_functions: tuple[Callable[..., Any], ...] = (),
        *,
        opened: frozenset[str] | None = None,
        asked_for: frozenset[str] = frozenset(),
        keep_source: bool = False,
        keep_output: bool = True,
    ) -> None:
        self.is_leaf = is_leaf or (lambda module, path: is_leaf_class(type(module)))
        self.opened = opened
        self.asked_for = asked_for
        self._autowrap = (tuple(autowrap_modules), tuple(autowrap_functions))
        # What another trace knew of the same model, if nobody has touched that since; found out for each trace else.
        self.surroundings: Surroundings | None = None
        self._keep_source = keep_source
        self.keep_output = keep_output

    def trace(
        self,
        root: nn.Module | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_enough: IsEnough | None = None,
    ) -> ExampleTrace:
        """Run `root(*args, **kwargs)` and return what was recorded.

        Nothing is computed, unless the model asks for values; then it runs on the example for real. The model and the
        inputs are as before afterwards, also after an error. Where something fails, `is_enough` is asked with the graph
        so far and the path of the innermost module that failed; if all that is wanted is there, the trace ends there.

        Raises:
            TraceError: what the root module itself does cannot be followed; the message says where and what to do.
        """
        around = self.surroundings or Surroundings(root, (args, kwargs), *self._autowrap)
        is_without_values = any(
            value.is_meta for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        )
        # Gradients are on whatever the caller has, or a `no_grad` of the model would change nothing and not be seen;
        # but some models run without only.
        gradients = (True,) if torch.is_grad_enabled() else (True, False)
        errors: list[Exception] = []
        for is_real in (False,) if is_without_values else (False, True):
            for enabled in gradients:
                try:
                    return self.run_once(around, args, kwargs, is_enough, is_real=is_real, gradients=enabled)
                except FeatxError:
                    raise
                except NeedsValues as error:
                    if is_real or is_without_values:
                        whose = "its weights have" if is_real else "the example has"
                        raise _error(around.traced, f"the model asks for values, and {whose} none", "") from error
                    break
                except Exception as error:
                    errors.append(error)
        raise errors[-1]

    def run_once(
        self,
        around: Surroundings,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_enough: IsEnough | None = None,
        *,
        is_real: bool,
        gradients: bool = True,
        earlier: ExampleTrace | None = None,
        dtype: torch.dtype | None = None,
        disguise: Disguise = larger,
    ) -> ExampleTrace:
        """Trace on real tensors, or on those without values and no others, with gradients or without; see `trace`.

        With `earlier`, a trace of the same at other sizes, it ends with `Diverged` where it does not do the same, and
        C code sees the numbers that are others as `disguise` makes them. With `dtype`, floating-point weights and
        buffers are taken to be of that one, in a trace without values.

        Raises:
            NeedsValues: the model asks for a value that its tensors do not have. It is no Exception.
            TraceError: something cannot be followed.
        """
        absent: set[tuple[nn.Module, str]] = set()
        read_first: set[tuple[nn.Module, str]] = set()
        converting = list(earlier.converting) if earlier is not None else []
        line = line_of(user_frame())
        while True:
            trace = ExampleTrace(self, around, is_real=is_real, gradients=gradients, keep_source=self._keep_source)
            trace.absent, trace.read_first, trace.converting = absent, read_first, converting
            if dtype is not None:
                trace.stand_ins.cast(around.root, dtype)
            trace.disguise = disguise
            if earlier is not None:
                trace.compare_with(earlier)
            try:
                trace.run(args, kwargs, is_enough)
                break
            except Unfollowable as error:
                # What is found when forward is over has no line of the model.
                raise _error(around.traced, error.what, error.place if error.line != line else "") from error
            except Converts as error:
                converting = [*converting, error.namespace]
            except AssignedAnew as error:  # where forward reads it ahead of that, it will be missing
                absent = {*absent, error.attribute}
            except AttributeError as error:
                missing = {attribute for attribute in absent if attribute[1] == error.name}
                if not missing:
                    raise
                absent, read_first = absent - missing, read_first | missing
        empty_functions_that_keep(trace.let_go())
        return trace


class ExampleTrace(WrappedCalls):
    """One run of a model on an example. `graph` is what it did."""

    def __init__(
        self, tracer: ExampleTracer, surroundings: Surroundings, *, is_real: bool, gradients: bool, keep_source: bool
    ) -> None:
        policy = (tracer.is_leaf, tracer.opened, tracer.asked_for)
        super().__init__(surroundings, *policy, is_real=is_real, keep_source=keep_source)
        self.surroundings = surroundings
        self.signature = surroundings.signature
        self._keep_output = tracer.keep_output
        # Whether it runs with gradients switched on.
        self.gradients = gradients
        self._saved = SavedState()
        # The tensors of the model by their memory, which a trace for real may write.
        self._owners: dict[int, list[torch.Tensor]] = {}
        for tensor in surroundings.tensors if is_real else ():
            self._owners.setdefault(memory_of(tensor), []).append(tensor)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_enough: IsEnough | None) -> None:
        """Run the root on the example and record it. The model is as before afterwards."""
        around = self.surroundings
        with ExitStack() as stack:
            self.caller = user_frame()
            stack.callback(setattr, self, "caller", None)
            # Tensors count their versions outside inference mode only.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(gradients_set(self.gradients))
            self._grad_modes.is_enabled = self.gradients
            generators = SharedGenerators()
            stack.callback(generators.restore)
            stack.enter_context(torch.random.fork_rng(devices=None if self.is_real else []))
            stack.enter_context(self._saved)
            self.generator_state = torch.get_rng_state()
            stack.enter_context(borrowed(list(self.module_paths), self.on_module))
            caches = Caches(around.namespaces, around.kinds, self.is_of_trace)
            stack.enter_context(caches)
            conversions = [(namespace, name) for namespace in self.converting for name in CONVERSIONS]
            stack.enter_context(wrapped([*around.places, *conversions], self.on_draw, self.on_wrapped))
            stack.enter_context(self._attributes_restored())
            for module, name in self.absent:
                del module.__dict__[name]
            call_args, call_kwargs = bind_example(self, around.function, args, kwargs, self._stand_in)
            if not self.gradients and self.expected_numbers is None:
                self.on_grad_question()
            stack.enter_context(self.kernels)
            stack.enter_context(_Mode(self))
            try:
                result = self._call(*call_args, **call_kwargs)
                self.check_unseen()
                stack.enter_context(torch._C.DisableTorchFunction())
                stack.enter_context(self.kernels.seen())
                output = self.create_arg(result) if self._keep_output else None
            except LeftBehind:
                raise
            except (Unfollowable, NeedsValues, Exception) as error:
                self.whole = 0
                self.names.assign()
                if is_enough is None or not is_enough(self.graph, self.broken_off):
                    self.check_missing(error)
                    raise
                output = None
            stack.enter_context(torch._C.DisableTorchFunction())
            self._check_left_behind(generators, caches)
            self._autocast_modes.leave()
            self.graph.output(output)
            if any(map(compares_objects, self._codes_that_ran())):
                require_distinct_inputs(self.graph)
        self.is_active = False
        self.names.assign()
        for node, tensor, version in self.versions:
            node.meta["is_overwritten"] = tensor._version != version or memory_of(tensor) in self.uncounted

    def _check_left_behind(self, generators: SharedGenerators, caches: Caches) -> None:
        self.check_states()
        self.check_memory()
        self.check_generator()
        if generators.have_drawn():
            raise LeftBehind("forward draws from a random generator of Python or numpy by a name of its own")
        number = caches.changed_number()
        if number is not None:
            raise LeftBehind(f"forward changes the number {number} of its Python module or of a class")

    def _codes_that_ran(self) -> set[CodeType]:
        functions = [inspect.unwrap(self.surroundings.function), *(type(each).forward for each in self._looked_into)]
        codes = (getattr(function, "__code__", None) for function in functions)
        return self.codes | {code for code in codes if code is not None}

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # The hooks of the root are code like any other, and what they do to its inputs, all else is computed from.
        if has_hooks(self.root):
            return type(self.root)._call_impl(self.root, *args, **kwargs)
        return self.surroundings.function(*args, **kwargs)

    def let_go(self) -> list[torch.Tensor]:
        """Drop all values of the trace, which is over; return the stand-ins that somebody else keeps."""
        followed = [
            weakref.ref(tensor) for tensor, _ in self.memories if tensor.is_meta and self._device.type != "meta"
        ]
        self.lineage, self.stand_ins, self.states = Lineage(), StandIns({}), ModuleStates(())
        self.versions, self.memories = [], []
        kept = (reference() for reference in followed)
        return [tensor for tensor in kept if tensor is not None]

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_real or tensor.is_meta:
            return tensor.detach().clone(memory_format=torch.preserve_format)
        return self.stand_ins.new(tensor)  # one tensor may be given as two inputs

    @contextmanager
    def _attributes_restored(self) -> Generator[None]:
        # The parameters and submodules of all modules, and the attributes of torch's.
        held = [dicts for each in self.module_paths for dicts in (each._parameters, each._modules)]
        held += [each.__dict__ for each in self.module_paths if self.states.initial(each) is None]
        kept = KeptDicts(each for each in held if isinstance(cast(object, each), dict))
        orders = [(module, list(module.__dict__)) for module in {module for module, _ in self.absent}]
        # Some models register hooks in forward, to collect what their layers give.
        hooks = {each: [held.copy() for held in _hooks_of(each)] for each in self.module_paths if has_hooks(each)}
        try:
            yield
        finally:
            self.states.restore()
            for module, names in orders:
                for name in names:
                    module.__dict__[name] = module.__dict__.pop(name)
            kept.restore()
            for each in self.module_paths:
                if has_hooks(each):
                    for held, before in zip(_hooks_of(each), hooks.get(each, [{}] * len(_HOOKS)), strict=True):
                        held.clear()
                        held.update(before)
            for module, mode in self._training.items():
                if mode_of(module) is not mode:
                    module.__dict__["training"] = mode

    def save_globals(self, tensors: Iterable[Any]) -> None:
        """Save the tensors among these that are globals of the model's code, which a whole module is about to write."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._saved.save(self.surroundings.global_tensors.get(memory_of(tensor), ()))

    def on_write(self, function: Any, tensors: list[torch.Tensor]) -> None:
        """Save the tensors of the model whose memory a kernel of a trace for real is about to write."""
        if "_foreach_" in function._schema.name:  # under a dispatch mode, its writes make no new versions
            self.uncounted.update(map(memory_of, tensors))
            self.wrote_unseen = self.wrote_unseen or bool(self.whole)
        for tensor in tensors:
            owners = self._owners.get(memory_of(tensor))
            if owners:
                self.wrote_model = True
                self._saved.save(owners)


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


def _hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [getattr(module, name) for name in _HOOKS]


class _Mode(TorchFunctionMode):
    """Hands every torch call of this thread to the trace."""

    def __init__(self, trace: ExampleTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self._trace.kernels.seen():
            return self._trace.on_call(func, args, kwargs or {})


def _error(root: Any, what: str, place: str) -> TraceError:
    name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "function")
    return TraceError(
        f"cannot trace {name}: {f'{what} {place}'.rstrip(' ,')}. To go on, put the code that does it into a submodule, "
        "which is kept whole, or into a function that featx.wrap marks."
    )
