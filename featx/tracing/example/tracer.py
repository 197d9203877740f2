"""ExampleTracer: run `forward` on an example, and record the graph of what it really does.

Tensors stay tensors: every torch call passes through a `TorchFunctionMode`, which runs it on stand-ins without values
and knows a tensor by its identity. Sizes are traced numbers. What Python decides becomes a guard. Where the model asks
for a value, the trace starts again with real tensors.
"""

from __future__ import annotations

import functools
import inspect
import math
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from featx.errors import FeatxError, TraceError
from featx.ir.graph import Graph
from featx.tracing.checks.left_behind import comes_from_inputs
from featx.tracing.checks.replay import Record, Replay
from featx.tracing.environment.caches import empty_functions_that_keep
from featx.tracing.environment.generators import SharedGenerators
from featx.tracing.environment.heard_calls import CallListener, HeardCalls, hands_over
from featx.tracing.environment.recursion import room_for
from featx.tracing.environment.saved_tensors import SavedState
from featx.tracing.environment.thread_modes import ThreadModes
from featx.tracing.example.calls import LeafPolicy
from featx.tracing.example.lineage import Lineage, Origin
from featx.tracing.example.recording import NeedsValues
from featx.tracing.example.surroundings import ModelTensors, Surroundings
from featx.tracing.example.wrapped_calls import WrappedCalls
from featx.tracing.guards.conversions import CONVERSIONS
from featx.tracing.guards.example_inputs import bind_example
from featx.tracing.guards.guards import require_distinct_inputs
from featx.tracing.guards.scalars import Disguise, Diverged, larger
from featx.tracing.guards.structure import contents_of
from featx.tracing.replica.mode_reads import ModeReads, has_set_mode, listen
from featx.tracing.replica.module_states import ModuleStates
from featx.tracing.replica.modules import has_hooks, intercept
from featx.tracing.replica.replica import Replica, WritesModel, tensors_held_by
from featx.tracing.signals import AssignedAnew, Converts, Disturbed, LeftBehind, Unfollowable
from featx.tracing.source.frames import compares_objects, line_of, user_frame
from featx.tracing.stand_ins.stand_ins import StandIns
from featx.tracing.symbolic.constants import memory_of
from featx.tracing.symbolic.tracer import is_leaf_class
from featx.tree import tree_leaves

_ABSENT = object()
IsEnough = Callable[[Graph, str], bool]
# How often a trace that other threads disturbed runs again.
ATTEMPTS = 10


@dataclass(frozen=True)
class _Conditions:
    """Under which conditions a model runs; see `ExampleTracer.run_once`."""

    is_real: bool
    gradients: bool
    earlier: ExampleTrace | None
    dtype: torch.dtype | None
    disguise: Disguise
    before: ExampleTrace | None
    disguised: frozenset[int]


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
        training: trace the model as it is in train mode, or in eval mode; by default in the modes in which it is.
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
        training: bool | None = None,
    ) -> None:
        self.is_leaf = is_leaf or (lambda module, path: is_leaf_class(type(module)))
        self.opened = opened
        self.asked_for = asked_for
        self._autowrap = (tuple(autowrap_modules), tuple(autowrap_functions))
        # What another trace knew of the same model, if nobody has touched that since; found out for each trace else.
        self.surroundings: Surroundings | None = None
        self._keep_source = keep_source
        self.keep_output = keep_output
        self.training = training
        # What hears whether code of the model asks in which mode a module is.
        self.reads: ModeReads | None = None
        # Whether replicas outlive their runs, so that another call can come; `drop_replica` ends that.
        self.keeps_replicas = False
        # Whether each call that sets torch's generator is heard, since other threads have disturbed a trace.
        self.hears_seeds = False

    def trace(
        self,
        root: nn.Module | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_enough: IsEnough | None = None,
    ) -> ExampleTrace:
        """Run `root(*args, **kwargs)` and return what was recorded.

        Nothing is computed, unless the model asks for values; then it runs on the example for real. What runs is a
        replica: the model is only read, and the inputs are copied. Where something fails, `is_enough` is asked with
        the graph so far and the path of the innermost module that failed; if all that is wanted is there, the trace
        ends there.

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
        before: ExampleTrace | None = None,
        disguised: frozenset[int] = frozenset(),
    ) -> ExampleTrace:
        """Trace on real tensors, or on those without values and no others, with gradients or without; see `trace`.

        With `earlier`, a trace of the same at other sizes, it ends with `Diverged` where it does not do the same, and C
        code sees the numbers that are others, and those at the positions `disguised`, as `disguise` makes them. With
        `dtype`, floating-point weights and buffers are taken to be of that one, in a trace without values. With
        `before`, it is the next call on the replica of that trace, which must not have been dropped.

        Raises:
            NeedsValues: the model asks for a value that its tensors do not have. It is no Exception.
            TraceError: something cannot be followed.
        """
        modes = ThreadModes()
        try:
            try:
                conditions = _Conditions(is_real, gradients, earlier, dtype, disguise, before, disguised)
                trace = self._run_until_done(around, args, kwargs, is_enough, conditions)
                if not self.keeps_replicas or (earlier is not None and before is None):
                    trace.drop_replica()
            except KeyboardInterrupt as error:
                _end_contexts(error)
                raise
            finally:
                modes.leave()
        finally:
            modes.leave()  # again: an interrupt may have ended the first one
        return trace

    def _run_until_done(
        self,
        around: Surroundings,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        is_enough: IsEnough | None,
        conditions: _Conditions,
    ) -> ExampleTrace:
        """Run again for as long as a run finds out that something has to be otherwise from its start."""
        earlier, before = conditions.earlier, conditions.before
        absent: set[tuple[str, str]] = set()
        read_first: set[tuple[str, str]] = set()
        known = earlier or before
        converting = list(known.converting) if known is not None else []
        copies_tensors = "buffers" if conditions.is_real else "none"
        attempts = ATTEMPTS
        line = line_of(user_frame())
        while True:
            if before is None:
                replica = around.replica(self.training, copies_tensors)
            else:
                replica = before.replica, before.tensors
            trace = ExampleTrace(self, around, replica, conditions, keep_source=self._keep_source)
            trace.converting = converting
            if before is None:
                trace.absent, trace.read_first = absent, read_first
            if earlier is not None:
                trace.compare_with(earlier)
            try:
                trace.run(args, kwargs, is_enough)
                break
            except Unfollowable as error:
                # What is found when forward is over has no line of the model.
                raise _error(around.traced, error.what, error.place if error.line != line else "") from error
            except (Converts, WritesModel, AssignedAnew) as error:
                if before is not None:  # a call that has been broken off cannot come again on the same replica
                    raise Diverged from error
                if isinstance(error, Converts):
                    converting = [*converting, error.namespace]
                elif isinstance(error, WritesModel):
                    copies_tensors = "all"
                else:  # where forward reads it ahead of that, it will be missing
                    absent = {*absent, error.attribute}
            except Disturbed as error:
                self.hears_seeds = True
                if before is not None:  # its replica has been called by then
                    raise
                attempts -= 1
                if not attempts:
                    raise TraceError(f"cannot trace {_name(around.traced)} while other threads run: {error}") from error
            except AttributeError as error:
                missing = {attribute for attribute in absent if attribute[1] == error.name}
                if not missing:
                    raise
                absent, read_first = absent - missing, read_first | missing
        return trace


class ExampleTrace(WrappedCalls):
    """One run of a model on an example. `graph` is what it did."""

    def __init__(
        self,
        tracer: ExampleTracer,
        surroundings: Surroundings,
        replica: tuple[Replica, ModelTensors],
        conditions: _Conditions,
        *,
        keep_source: bool,
    ) -> None:
        policy = (tracer.is_leaf, tracer.opened, tracer.asked_for)
        is_real = conditions.is_real
        super().__init__(surroundings, replica, *policy, is_real=is_real, keep_source=keep_source)
        if conditions.dtype is not None:
            self.stand_ins.cast(self.root, conditions.dtype)
        self.disguise, self.disguised = conditions.disguise, conditions.disguised
        self.surroundings = surroundings
        self.signature = surroundings.signature
        self._keep_output = tracer.keep_output
        self._hears_seeds = tracer.hears_seeds
        # Whether it runs with gradients switched on.
        self.gradients = conditions.gradients
        if tracer.keeps_replicas and conditions.earlier is None and conditions.before is None:
            self.call_record = Record()
        self._reads = tracer.reads
        # The traces of all calls of the replica.
        self._calls: list[ExampleTrace] = [] if conditions.before is None else conditions.before._calls
        if conditions.before is not None:
            self.absent, self.read_first = conditions.before.absent, conditions.before.read_first
            conditions.before.put_back_tensors()
            self.from_earlier_inputs, self.earlier_constants = conditions.before.kept()
            self.states = ModuleStates(self.module_paths, conditions.before.states)
        self._saved = SavedState()
        # The memory of the model, which a trace for real must not write, and that of copies of its tensors.
        self._shared: frozenset[int] = surroundings.memories if is_real else frozenset()
        self._copied = set(map(memory_of, self.tensors.all)) - self._shared if is_real else set[int]()
        # What the trace has made, when it is over: tensors that live on, and where they come from.
        self._stood_for: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._followed: list[tuple[weakref.ref[torch.Tensor], Origin]] = []
        # The tensors of a second call that was compared with this one.
        self._twins: list[weakref.ref[torch.Tensor]] = []
        # What puts back what this run changes outside of the replica, until all of it is. Each may be called twice.
        self._restorers: list[Callable[[], None]] = []
        self._calls.append(self)  # all that `drop_replica` asks for is there

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_enough: IsEnough | None) -> None:
        """Run the root on the example and record it."""
        self.caller = user_frame()
        try:
            try:
                self._run(args, kwargs, is_enough)
            finally:
                self._restore()
        finally:
            self._restore()  # again: an interrupt may have ended the first one
            self.caller = None
        self.is_active = False
        self._after_run()

    def _after_run(self) -> None:
        if self._reads is not None:
            self._reads.any = self._reads.any or any(map(has_set_mode, self.module_paths))
        self.names.assign()
        for node, tensor, version in self.versions:
            node.meta["is_overwritten"] = tensor._version != version or memory_of(tensor) in self.uncounted
        self.let_go()

    def _restore(self) -> None:
        for restore in reversed(self._restorers):
            restore()
        self._restorers = []

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_enough: IsEnough | None) -> None:
        around = self.surroundings
        modes = ThreadModes()
        heard = HeardCalls(self._listeners())
        generators = SharedGenerators()
        around.look_at_caches()
        self._restorers += [
            heard.stop, generators.restore, self.generator.restore, self._saved.restore, self._restore_caches,
            around.passing.lift, modes.leave,
        ]  # fmt: skip
        self._grad_modes.is_enabled = self.gradients
        self._prepare_replica()
        self.generator.is_heard = heard.start() and self._hears_seeds
        self._lay_pass_throughs()
        modes.leave_inference_mode()
        modes.enter(_Mode(self), self.kernels, gradients=self.gradients)
        with torch._C.DisableTorchFunction(), self.kernels.seen():
            call_args, call_kwargs = bind_example(self, around.signature, args, kwargs, self._stand_in)
            if not self.gradients and self.expected_numbers is None:
                self.on_grad_question()
        try:
            result = self._call(*call_args, **call_kwargs)
            self.check_unseen()
            with torch._C.DisableTorchFunction(), self.kernels.seen():
                output = self.create_arg(result) if self._keep_output else None
        except LeftBehind:
            raise
        except (Unfollowable, NeedsValues, Exception) as error:
            self.whole = 0
            self.names.assign()
            if is_enough is None or not is_enough(self.graph, self.broken_off):
                self.check_missing(error)
                raise
            output = result = None
            if self.call_record is not None:
                self.call_record.broke_off = True
        if self.call_record is not None:
            self.call_record.result = result
        if not around.passing.are_laid():
            raise Disturbed("functions of its Python modules were laid over and lifted meanwhile")
        with torch._C.DisableTorchFunction(), self.kernels.seen():
            self._check_left_behind(generators)
            self._autocast_modes.leave()
            self.graph.output(output)
            if any(map(compares_objects, self._codes_that_ran())):
                require_distinct_inputs(self.graph)

    def _listeners(self) -> list[CallListener]:
        listeners: list[CallListener] = [self.generator.on_call] if self._hears_seeds else []
        # On stand-ins, what another thread computes has no values, and is seen where forward uses it.
        return [*listeners, self._on_handover] if self.is_real else listeners

    def watch(self, value: Any) -> None:
        """Look after what a cached function has returned, which lives on."""
        self.surroundings.caches.watch(value)

    def _on_handover(self, frame: FrameType, event: str, called: Any) -> None:
        # What calls that the trace knows of do inside, such as torch.cond, is theirs.
        if not self.whole and not self.kernels.depth and hands_over(frame, event, called):
            self.refuse_other_threads()

    def _lay_pass_throughs(self) -> None:
        conversions = [(namespace, name) for namespace in self.converting for name in CONVERSIONS]
        self.surroundings.passing.lay(self.on_draw, self.on_wrapped, conversions)

    def _restore_caches(self) -> None:
        self.surroundings.caches.restore(self.is_of_trace)

    def _prepare_replica(self) -> None:
        if self._reads is not None:
            listen(self.module_paths, self._reads)
        intercept(self.module_paths, self.on_module)
        self._remove_absent()

    def _remove_absent(self) -> None:
        for path, name in self.absent:
            self.root.get_submodule(path).__dict__.pop(name, None)

    def _check_left_behind(self, generators: SharedGenerators) -> None:
        self.check_states()
        self._check_inputs()
        self.check_memory()
        self.check_generator()
        if generators.have_drawn():
            if generators.others_may_have_drawn():
                raise Disturbed("a random generator of Python or numpy was drawn from")
            raise LeftBehind("forward draws from a random generator of Python or numpy by a name of its own")
        number = self.surroundings.caches.changed_number()
        if number is not None:
            raise LeftBehind(f"forward changes the number {number} of its Python module or of a class")

    def _check_inputs(self) -> None:
        for name, container, before in self.given:
            now = contents_of(container)
            if any(item is not before.get(key, _ABSENT) for key, item in now.items()):
                raise LeftBehind(f"forward keeps something in the input '{name}', a {type(container).__name__},")

    def _codes_that_ran(self) -> set[CodeType]:
        functions = [inspect.unwrap(self.surroundings.function), *(type(each).forward for each in self._looked_into)]
        codes = (getattr(function, "__code__", None) for function in functions)
        return self.codes | {code for code in codes if code is not None}

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # The hooks of the root are code like any other, and what they do to its inputs, all else is computed from.
        call: Callable[..., Any]
        if has_hooks(self.root):
            call = functools.partial(type(self.root)._call_impl, self.root)
        else:
            traced = self.surroundings.traced
            call = self.root.forward if isinstance(traced, nn.Module) else traced
        with room_for(self.surroundings.levels):
            return call(*args, **kwargs)

    def let_go(self) -> None:
        """Drop all values of the trace, which is over."""
        for tensor, _ in self.memories:
            origin = self.lineage.get(tensor)
            if origin is not None and not self._is_shared(tensor):
                self._followed.append((weakref.ref(tensor), origin))
        self._stood_for = self.stand_ins.stood_for()
        self.lineage, self.stand_ins = Lineage(), StandIns({})
        self.versions, self.memories, self.given = [], [], []
        self.generator.forget()

    def put_back_tensors(self) -> None:
        """Let modules hold the tensors of before where forward has assigned what stands for them.

        `self.steps += 1` assigns a stand-in; `self.table = self.table.to(x.device)` another name of the same memory.
        """
        stood_for = self._stood_for
        for module in self.module_paths if stood_for else ():
            dicts: tuple[Any, ...] = (module._parameters, module._buffers, module.__dict__)
            for held in dicts:
                if not stood_for.keys().isdisjoint(map(id, held.values())):
                    held.update(
                        {name: stood_for[id(value)][1] for name, value in held.items() if id(value) in stood_for}
                    )
        self.states.put_back_aliases()

    def kept(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return the tensors of the trace, by id, that live on: those computed from its inputs, and all others."""
        from_inputs, others = self.from_earlier_inputs.copy(), self.earlier_constants.copy()
        made = (tensor for module in self.module_paths for tensor in tensors_held_by(module))
        others.update((id(tensor), tensor) for tensor in made if id(tensor) not in self._paths)
        for reference, origin in self._followed:
            tensor = reference()
            if tensor is not None:
                (from_inputs if comes_from_inputs(origin) else others)[id(tensor)] = tensor
        others = {key: tensor for key, tensor in others.items() if key not in from_inputs}
        return from_inputs, others

    def origins(self) -> dict[int, Origin]:
        """Return where the tensors of the trace that live on come from, by id."""
        alive = ((reference(), origin) for reference, origin in self._followed)
        return {id(tensor): origin for tensor, origin in alive if tensor is not None}

    def drop_replica(self) -> None:
        """Drop the replica, and empty the cached functions of any file that keep a tensor of one of its calls."""
        self.replica.drop()
        references: list[weakref.ref[torch.Tensor]] = []
        for call in self._calls:
            references += [*(each for each, _ in call._followed), *call._twins]
            call.states, call._stood_for, call._followed, call._twins = ModuleStates(()), {}, [], []
        self._calls.clear()
        alive = (reference() for reference in references)
        empty_functions_that_keep([tensor for tensor in alive if tensor is not None and tensor.is_meta])

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._paths or (tensor.is_meta and self._device.type == "meta")

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            if not self.is_real:
                raise NeedsValues  # what a sparse tensor computes depends on which of its values are there
            found = tensor.detach().clone()
        elif self.is_real or tensor.is_meta:
            found = tensor.detach().clone(memory_format=torch.preserve_format)
        else:
            found = self.stand_ins.new(tensor)  # one tensor may be given as two inputs
        if self.call_record is not None:
            self.call_record.inputs.append(found)
        return found

    def repeats(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Say whether a second call on the replica does the same; False too where that is not tried.

        The record of the first call is dropped. Where the answer is False the replica is used up.
        """
        record, self.call_record = self.call_record, None
        # What opened code reads of a module that is kept whole, the calls of that module may have changed.
        if record is None or self.states.are_changed_by_calls or self.replica.has_hidden_state:
            return False
        self.replay, self.whole = Replay(record, self._paths), 0
        self.put_back_tensors()
        self._remove_absent()
        try:
            try:
                return self._call_again(self.replay, args, kwargs)
            except KeyboardInterrupt as error:
                _end_contexts(error)
                raise
            finally:
                self._restore()
        finally:
            self._restore()  # again: an interrupt may have ended the first one
            self._twins, self.replay = self.replay.end(), None

    def _call_again(self, replay: Replay, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        modes = ThreadModes()
        self._restorers = [self._restore_caches, self.surroundings.passing.lift, modes.leave]
        self._lay_pass_throughs()
        modes.leave_inference_mode()
        modes.enter(replay.mode, None, gradients=self.gradients)

        def call() -> Any:
            with torch._C.DisableTorchFunction():
                call_args, call_kwargs = replay.inputs(self.signature, args, kwargs)
            return self._call(*call_args, **call_kwargs)

        return replay.does_the_same(call) and self.surroundings.passing.are_laid()

    def save_globals(self, tensors: Iterable[Any]) -> None:
        """Save the tensors among these that are globals of the model's code, which a whole module is about to write."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._saved.save(self.surroundings.global_tensors.get(memory_of(tensor), ()))

    def on_write(self, function: Any, tensors: list[torch.Tensor]) -> None:
        """Note that a kernel of a trace for real is about to write tensors.

        Raises:
            WritesModel: one of them is a tensor of the model that the replica shares.
        """
        if "_foreach_" in function._schema.name:  # under a dispatch mode, its writes make no new versions
            self.uncounted.update(map(memory_of, tensors))
            self.wrote_unseen = self.wrote_unseen or bool(self.whole)
        memories = set(map(memory_of, tensors))
        if not memories.isdisjoint(self._shared):
            raise WritesModel
        self.wrote_model = self.wrote_model or not memories.isdisjoint(self._copied)


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


def _end_contexts(error: KeyboardInterrupt) -> None:
    # A context manager of torch that was left in its `__exit__` pushes the mode of the trace again when its frame goes.
    traceback.clear_frames(error.__traceback__)


def _error(root: Any, what: str, place: str) -> TraceError:
    return TraceError(
        f"cannot trace {_name(root)}: {f'{what} {place}'.rstrip(' ,')}. To go on, put the code that does it into a "
        "submodule, which is kept whole, or into a function that featx.wrap marks."
    )


def _name(root: Any) -> str:
    return type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "function")
