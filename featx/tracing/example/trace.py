"""ExampleTrace: one run of a model on an example, what is set up for it, and what is put back afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch

from featx.errors import FeatxError
from featx.ir.arguments import nodes_in
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.calls.function_calls import FunctionCalls
from featx.tracing.calls.measured_calls import MeasuredCalls
from featx.tracing.calls.model_writes import ModelWrites
from featx.tracing.calls.module_calls import ModuleCalls
from featx.tracing.calls.opening import Opening
from featx.tracing.calls.torch_calls import TorchCalls
from featx.tracing.environment.generators import SharedGenerators
from featx.tracing.environment.raised_errors import free_frames
from featx.tracing.environment.restorers import run_restorers
from featx.tracing.environment.thread_modes import FunctionMode, ThreadModes
from featx.tracing.example.conditions import Conditions, RequestedNodeFinder
from featx.tracing.example.final_checks import FinalChecks
from featx.tracing.example.observers import Observers
from featx.tracing.example.replay import Replay, does_the_same_again
from featx.tracing.history.call_record import Record
from featx.tracing.history.earlier_calls import EarlierCalls
from featx.tracing.history.lineage import Lineage, Origin
from featx.tracing.inputs.model_call import call_model
from featx.tracing.inputs.run_inputs import RunInputs
from featx.tracing.model_state.attribute_changes import AttributeChanges
from featx.tracing.model_state.hidden_attributes import hide
from featx.tracing.model_state.tensor_attributes import TensorAttributes
from featx.tracing.nodes.module_output import mark_output
from featx.tracing.recording.guard_nodes import is_about_values
from featx.tracing.recording.numbers import Numbers
from featx.tracing.recording.recorder import Recorder
from featx.tracing.recording.results import Results
from featx.tracing.replica.interception import intercept
from featx.tracing.replica.mode_reads import has_set_mode, record_mode_reads
from featx.tracing.replica.model_context import ModelContext, ModelTensors
from featx.tracing.replica.replica import Replica
from featx.tracing.side_effects.foreign_tensors import ForeignTensors
from featx.tracing.side_effects.forward_side_effects import is_from_inputs
from featx.tracing.side_effects.kept_tensors import KeptTensors, drop_tensors
from featx.tracing.side_effects.left import Left
from featx.tracing.side_effects.state_checks import StateChecks
from featx.tracing.signals import (
    AllNeededRecorded,
    ChangesOuterValues,
    Diverged,
    NeedsFixedKeys,
    NeedsRealValues,
    ThreadInterference,
    UnsupportedSideEffect,
    Untraceable,
)
from featx.tracing.source.frames import user_frame
from featx.tracing.source_writes.state_writes import StateWrite
from featx.tracing.stand_ins.known_results import KnownResults
from featx.tracing.stand_ins.stand_ins import StandIns, keeps_values
from featx.tree import tensors_in

if TYPE_CHECKING:
    from featx.tracing.example.tracer import ExampleTracer

_ELEMENTS_OF_A_LARGE_RUN = 200_000_000
# How many elements are computed in the time that is lost for each kernel, recorded or not.
_ELEMENTS_FOR_A_KERNEL = 50_000


class ExampleTrace:
    """One run of a model on an example.

    Attributes:
        graph: what the model did.
        model_context: what is traced.
        replica: the copy of it that runs.
        checks: compares the modules with what they were.
        numbers: the numbers that the model got.
        module_calls: which modules were looked into, and where the trace broke off.
        inputs: its inputs, and whether it may notice that two of them are one tensor.
        final_checks: what is checked when forward is over; knows which code has run.
        is_real: whether tensors have values.
        model_writes: the writes into the tensors of the model; None unless tensors have values.
        gradients: whether it runs with gradients switched on.
        find_requested: finds what is requested of it; None is all.
        early_stop_reason: the message of the error that ended forward early, after all requested values were there.
        called_later: the requested modules that code after that place may call.
        needed: how many of its nodes, the first ones, matter for what is requested; None is all.
        has_filled_caches: whether a second call was seen to use what this one has computed from sizes and constants.
        cached: the names of the nodes whose values the second call has used.
    """

    def __init__(
        self,
        tracer: ExampleTracer,
        opening: Opening,
        model_context: ModelContext,
        replica: tuple[Replica, ModelTensors],
        conditions: Conditions,
    ) -> None:
        self.model_context = model_context
        self.replica, self.tensors = replica
        self.is_real, self.gradients = conditions.is_real, conditions.gradients
        self._tracer = tracer
        self._is_first_call = conditions.before is None
        self._is_further = conditions.is_further
        self._tensor_attributes = TensorAttributes(self.tensors.all)
        recorder = self.recorder = Recorder(
            model_context, self.replica, self.tensors.paths, is_real=self.is_real, keep_source=tracer.keep_source
        )
        recorder.hooks.are_run = opening.opens_hooked
        recorder.later_calls.requested = opening.requested
        results = self._results = Results(recorder)
        before = conditions.before
        earlier_foreign = None if before is None else before._foreign
        self._foreign = ForeignTensors(self.tensors.all, earlier_foreign, are_shared=not self.is_real)
        self.model_writes = self._writes_of(model_context) if self.is_real else None
        self._torch_calls = TorchCalls(recorder, results, self.model_writes, self._foreign)
        if before is not None:
            before.put_back_tensors()
        earlier = None if before is None else before.checks.states
        self.checks = StateChecks(recorder, self._check_module, self.replica.paths, earlier, opening.must_open)
        self.checks.opened_modules.add(self.replica.root)
        measured = self._measured = MeasuredCalls(recorder, results, self._torch_calls, model_context)
        self.module_calls = ModuleCalls(recorder, self._torch_calls, measured, self.checks, self.replica, opening)
        self._function_calls = FunctionCalls(recorder, measured, model_context)
        self.inputs = RunInputs(recorder, results, model_context)
        self.inputs.kinds.note_model(self.tensors.all)
        self._observers = Observers(recorder, self._torch_calls, tracer, model_context)
        self.final_checks = FinalChecks(model_context, recorder, results, self._torch_calls, self.checks, self.inputs)
        self.find_requested: RequestedNodeFinder | None = None
        self.early_stop_reason: str | None = None
        self.called_later: frozenset[str] = frozenset()
        self.needed: int | None = None
        self.has_filled_caches = False
        self.cached: frozenset[str] = frozenset()
        self._kept = KeptTensors(recorder)
        # What puts back what this run changes outside of the replica, until all of it is. Each may be called twice.
        self._restorers: list[Callable[[], object]] = []
        # The traces of all calls of the replica.
        self._calls: list[ExampleTrace] = [] if conditions.before is None else conditions.before._calls
        # The context variables of all calls of the replica: a variable that had no value could not be emptied again.
        self._variables = copy_context() if conditions.before is None else conditions.before._variables
        self._apply(conditions)
        self._calls.append(self)  # all that `drop_replica` asks for is there

    def _writes_of(self, model_context: ModelContext) -> ModelWrites:
        return ModelWrites(self.recorder, model_context.memories, self.tensors.memories_by_path(), self._foreign)

    def _check_module(self) -> None:
        self._torch_calls.check_module()
        self.model_context.check_plain_values()

    def _apply(self, conditions: Conditions) -> None:
        recorder, earlier, before = self.recorder, conditions.earlier, conditions.before
        recorder.is_compared = self._tracer.keeps_replicas
        # A run without gradients that is compared with one that has them is to have the same nodes.
        self._checks_gradients = self._tracer.checks_gradient_mode or (
            not self.gradients and (earlier is None or not earlier.gradients)
        )
        if conditions.dtype is not None:
            recorder.stand_ins.cast(self.replica.root, conditions.dtype)
        self.numbers.disguise, self.numbers.disguised = conditions.disguise, conditions.disguised
        if conditions.is_recorded or (self._tracer.keeps_replicas and earlier is None and before is None):
            recorder.call_record = Record(gradients=self.gradients)
        if before is not None:
            recorder.earlier = before._kept.alive(self.replica.paths)
            before.numbers.next_call = self.numbers
        if earlier is not None:
            self.numbers.earlier = earlier.numbers
            # Where that was a trace for real, this one may be told what it read.
            self._torch_calls.value_log.expect(earlier._torch_calls.value_log.given)
            if not self.is_real:
                self._torch_calls.kernels.shapes.expect(earlier._torch_calls.kernels.shapes)
            # It ends where it does more. What is recorded and taken back counts for a while.
            recorder.most_nodes = 2 * len(earlier.graph.nodes) + 1000
            recorder.needed = None if conditions.is_complete else earlier.needed
            # This one may end before the code that tells.
            self.inputs.are_compared = earlier.inputs.are_compared

    @property
    def graph(self) -> Graph:
        """What the model did."""
        return self.recorder.graph

    @property
    def has_calls(self) -> bool:
        """Whether it has recorded a call of the model or of torch."""
        return any(node.op.startswith("call_") for node in self.graph.nodes)

    @property
    def name(self) -> str:
        """What messages call the model or function that is traced."""
        return self.model_context.name

    @property
    def numbers(self) -> Numbers:
        """The numbers that the model got."""
        return self.recorder.numbers

    @property
    def computed(self) -> int:
        """What a run for real has cost, in elements that are computed: a measure of time that is the same each time."""
        kernels = self._torch_calls.kernels
        return kernels.elements + _ELEMENTS_FOR_A_KERNEL * kernels.kernels_run

    @property
    def is_large(self) -> bool:
        """Whether it was a run for real that has computed so much that a run of the model takes seconds."""
        return self._torch_calls.kernels.elements >= _ELEMENTS_OF_A_LARGE_RUN

    @property
    def opaque_reasons(self) -> dict[str, str]:
        """Why modules are kept whole that the policy would look into, by path."""
        nodes = [node for node in self.graph.nodes if "opaque_because" in node.meta]
        return {str(node.target): node.meta["opaque_because"] for node in nodes}

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], find_requested: RequestedNodeFinder | None) -> None:
        """Run the root on the example and record it; `find_requested` as for `ExampleTracer.trace`."""
        self.find_requested = find_requested
        self.recorder.caller = user_frame()
        is_done = False
        try:
            try:
                self._variables.run(self._run, args, kwargs)
                is_done = True
            finally:
                self._variables.run(run_restorers, self._restorers)
        finally:
            try:
                self._variables.run(run_restorers, self._restorers)  # again: an interrupt may have ended the first one
            finally:
                self.recorder.caller = None
                if not is_done:
                    self.forget_record()
                    self.release_values()
        self.numbers.are_recorded = False
        reads = self._tracer.reads
        if reads is not None and any(map(has_set_mode, self.replica.paths)):
            reads.on_unknown()
        self.recorder.names.assign()
        self.recorder.write_log.mark_overwritten()
        self.release_values()

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = tensors_in((args, dict(kwargs)))
        generators = self._set_up(has_values=self.is_real or any(map(keeps_values, leaves)))
        kernels = self._torch_calls.kernels
        with torch._C.DisableTorchFunction(), kernels.recorded():
            call_args, call_kwargs = self.inputs.bind(args, kwargs)
            self._foreign.note_made((call_args, call_kwargs))
            if self._checks_gradients:
                self._function_calls.on_mode_query(torch.is_grad_enabled, (), {})
            self._observers.record_autocast()
        output, result = self._output_of_call(call_args, call_kwargs)
        self.module_calls.end()
        if self.recorder.call_record is not None:
            self.recorder.call_record.result = result
        if not self.model_context.passing.are_installed():
            raise ThreadInterference(
                "another trace replaced or restored functions in the model's Python files meanwhile"
            )
        with torch._C.DisableTorchFunction(), kernels.recorded():
            self._observers.check_threads()
            self._function_calls.check_cached()
            find_returned = functools.partial(self._returned, output)
            self.final_checks.check_side_effects(generators, self._tensor_attributes, find_returned)
            if self.replica.size_caches.have_other_keys():
                raise NeedsFixedKeys
            if self._measured.outer_values is not None and self._measured.outer_values.learn_from_run():
                raise ChangesOuterValues
            self.recorder.autocast_modes.leave()
            self.graph.output(output)
            self.inputs.require_aliases(self.graph, args, kwargs, self.final_checks.codes_that_ran())
            if self.numbers.earlier is None:  # else its graph is compared, and not kept
                self._mark_decisions_about_state()

    def _mark_decisions_about_state(self) -> None:
        """Note on each guard what other decisions might have written of the model's state."""
        guards = [node for node in self.graph.nodes if node.meta.get("is_guard")]
        about_values = {node for node in guards if is_about_values(node)}
        checks, failed_path = self.final_checks, self.module_calls.failed_module_path
        missed = checks.possible_state_writes(failed_path, for_other_inputs=True) if guards else frozenset()
        conditional = (
            checks.conditional_writes(failed_path, for_other_inputs=True) if about_values else frozenset[StateWrite]()
        )
        for node in guards:
            found = missed | conditional if node in about_values else missed
            if found:
                node.meta["possible_state_writes"] = found

    def possible_state_writes(self) -> frozenset[StateWrite]:
        """Return what code of opened modules may write of the model's state, and has not written in this run."""
        failed_path = self.module_calls.failed_module_path
        return self.final_checks.possible_state_writes(failed_path, for_other_inputs=False)

    def conditional_writes(self) -> frozenset[StateWrite]:
        """Return what code of opened modules, that did not run, may write by methods and functions of any kind."""
        failed_path = self.module_calls.failed_module_path
        return self.final_checks.conditional_writes(failed_path, for_other_inputs=False)

    def _set_up(self, *, has_values: bool) -> SharedGenerators:
        context = self.model_context
        modes = ThreadModes()
        hook = self._observers.hook(has_values=has_values)
        generators = SharedGenerators()
        context.refresh_caches(forget_left=self._is_first_call)
        self._restorers += [
            hook.stop, generators.restore, self._torch_calls.generator.restore, self._foreign.restore,
            self._restore_caches, context.passing.uninstall, modes.leave, self._results.restore_objects,
            self.module_calls.end, self._tensor_attributes.restore,
        ]  # fmt: skip
        self._torch_calls.start()
        self.recorder.grad_modes.is_enabled = self.gradients
        if self._tracer.reads is not None:
            self._tracer.reads.observe_run(self.recorder.opaque_call)
            record_mode_reads(self.replica.paths, self._tracer.reads)
        intercept(self.replica.paths, self.module_calls.on_call)
        self._remove_absent()
        if not self._is_first_call:
            context.caches.put_left()
        self._observers.start(hook)
        functions = self._function_calls
        context.caches.keep_iterators()
        context.passing.install(functions.on_draw, functions.on_call, self.numbers.names_to_follow())
        if not self._is_further:
            self._measured.outer_values = context.outer_values()
        modes.leave_inference_mode()
        modes.enter(FunctionMode(self._on_torch_call), self._torch_calls.kernels, gradients=self.gradients)
        self.module_calls.whole.checks_before.modes_around = torch._C._len_torch_function_stack()
        return generators

    def _output_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call forward; return its output as an argument of the output node, and as it is."""
        keep_output, is_requested = self._tracer.keep_output, "" in self._tracer.requested
        try:
            self.module_calls.check_root(self.replica.root, args, kwargs, needs_output=keep_output or is_requested)
            result = call_model(self.model_context, self.replica.root, self.recorder.raised, args, kwargs)
            self._torch_calls.check_unrecorded()
            with torch._C.DisableTorchFunction(), self._torch_calls.kernels.recorded():
                if is_requested:
                    mark_output(self.graph, self.recorder.create_result(result), "")
                return self.recorder.create_result(result) if keep_output else None, result
        except UnsupportedSideEffect:
            raise
        except (Untraceable, NeedsRealValues, AllNeededRecorded, Diverged, Exception) as error:
            self.recorder.opaque_call.leave()
            self.recorder.names.assign()
            if isinstance(error, Diverged) and not self.recorder.has_all_needed_nodes:
                raise
            is_done = self.recorder.has_all_needed_nodes or self.requested() or self._may_end_with(error)
            if not is_done or self._misses_absent(error):
                self.module_calls.check_missing(error)
                self._explain(error)
                raise
            if not self.recorder.hooks.are_run:
                self.module_calls.check_missing(error)
            self.early_stop_reason = _reason_of(error)
            self.called_later = self.recorder.later_calls.after_error(error.__traceback__)
            free_frames(error)
            if self.recorder.call_record is not None:
                self.recorder.call_record.stopped_early = True
            return None, None

    def requested(self) -> Collection[Node]:
        """Return the requested nodes, or none where one is missing or nothing is known of requests."""
        find = self.find_requested
        return () if find is None else find(self.graph, self.module_calls.failed_module_path)

    def _returned(self, output: Any) -> Collection[Node]:
        """Return the nodes in an output, and the requested ones."""
        self.recorder.names.assign()
        return {*nodes_in(output), *self.requested()}

    def _may_end_with(self, error: BaseException) -> bool:
        """Say whether the graph so far is what is asked for, since forward can be followed no further."""
        is_end = isinstance(error, Untraceable) or (self.is_real and isinstance(error, NeedsRealValues))
        return is_end and self._tracer.may_end_early and self.has_calls

    def _misses_absent(self, error: BaseException) -> bool:
        """Say whether forward has asked for an attribute that this trace has taken away."""
        return any(name == getattr(error, "name", None) for _, name in self.checks.absent)

    def _explain(self, error: BaseException) -> None:
        """Raise another error where this one may come from a module that was kept whole, and so did not run."""
        if self._misses_absent(error):
            return
        self.inputs.kinds.explain(error)
        if isinstance(error, (LookupError, AttributeError, TypeError)) and not isinstance(error, FeatxError):
            whole = [node for node in self.graph.nodes if "opaque_because" in node.meta]
            if whole:
                why = whole[-1].meta["opaque_because"].rstrip(" ,")
                raise Untraceable(
                    f"after the call of '{whole[-1].target}', which is kept whole ({why}), forward fails ({error!r}),"
                ) from error

    def _restore_caches(self) -> None:
        caches = self.model_context.caches
        caches.restore(self.recorder.is_made_here)
        names = caches.names_left(functools.partial(is_from_inputs, self.recorder))
        self.checks.left.update(Left("", name) for name in names)

    def _remove_absent(self) -> None:
        for path, name in self.checks.absent:
            on_read = functools.partial(self.checks.read_first.add, (path, name))
            hide(self.replica.root.get_submodule(path), name, on_read)

    # -- what the running code calls ---------------------------------------------------------------------------------

    def _on_torch_call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, torch_calls = self.recorder, self._torch_calls
        recorder.raised.check()
        with torch_calls.kernels.recorded():
            try:
                result = torch_calls.on_call(function, args, kwargs)
            except Exception as error:
                if not recorder.opaque_call.is_inside:
                    recorder.raised.note_failure(error)
                raise
            if recorder.call_record is not None and not recorder.opaque_call.is_inside:
                recorder.note_call(function, args, kwargs, result)
            return result

    # -- a second call -----------------------------------------------------------------------------------------------

    def can_repeat(self) -> bool:
        """Say whether a second call can be compared with the record of this one, without a trace of it."""
        # What opened code reads of a module that is kept whole, the calls of that module may have changed.
        is_changed = self.checks.states.are_changed_by_calls or self.replica.has_hidden_state
        return self.recorder.call_record is not None and not is_changed

    def has_changed_state(self) -> bool:
        """Say whether the call has changed Python objects, so that a second call may find others there."""
        return bool(self.checks.has_changed or self.model_context.caches.objects())

    def python_states(self) -> dict[str, Any]:
        """Describe the Python objects that opened code may change, by the path of the module; see `StateChecks`."""
        return self.checks.python_states(self.model_context.caches.objects())

    def repeats(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, returned: bool = True, inputs: bool = True
    ) -> bool:
        """Say whether a second call on the replica does the same.

        Where the answer is False the replica is used up. Only where `can_repeat` says so.

        Args:
            args: the example.
            kwargs: the example.
            returned: a call that returns its input gives forward that object, as the model does; in a trace it gives
                another one.
            inputs: inputs of the same form are one tensor, unless the graph checks whether they are.
        """
        record = self.recorder.call_record
        if record is None:
            return False
        one_object = record.returned_inputs.copy() if returned else {}
        if inputs and not self.inputs.are_compared:
            one_object.update(record.equal_inputs)
        # With gradients switched off, so that what depends on them is another call.
        gradients = self.gradients and self._tracer.checks_gradient_mode
        replay = Replay(record, self.recorder.owned, one_object, gradients=gradients)
        self.put_back_tensors()
        self._remove_absent()
        try:
            # Where the first call has recorded what forward does with autocast, that is compared.
            return self._variables.run(
                does_the_same_again, replay, self.model_context, self.replica, self.recorder, args, kwargs,
                toggles_autocast=not self._tracer.observes_autocast,
            )  # fmt: skip
        finally:
            self._kept.add_twins(replay.end())

    def require_aliases(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Let the graph check which inputs are one tensor, since forward depends on it.

        Raises:
            NeedsSharedInputs: some are on the example, and forward got different ones.
        """
        self.inputs.are_compared = True
        self.inputs.require_aliases(self.graph, args, kwargs, ())

    # -- when it is over ---------------------------------------------------------------------------------------------

    def forget_record(self) -> None:
        """Drop the record for a second call, which keeps all tensors."""
        self.recorder.call_record = None

    def release_values(self) -> None:
        """Drop all values of the trace, which is over."""
        self._kept.take()
        recorder = self.recorder
        recorder.lineage, recorder.stand_ins = Lineage(), StandIns({}, KnownResults())
        recorder.write_log.release()
        self._results.objects = []
        self.inputs.release()
        self._torch_calls.generator.forget()
        self._torch_calls.recent_writes.release(0)

    def put_back_tensors(self) -> None:
        """Let modules hold the tensors of before where forward has assigned what stands for them, or another name."""
        self._kept.put_back(self.replica.paths)
        self.checks.states.put_back_aliases()  # `self.table = self.table.to(x.device)`

    def origins(self) -> dict[int, Origin]:
        """Return where the tensors of the trace that live on come from, by id."""
        return self._kept.origins()

    def drop_replica(self) -> None:
        """Drop the replica, and empty the cached functions of any file that keep a tensor of one of its calls."""
        self.replica.drop()
        self.model_context.caches.forget_left()
        calls = self._calls.copy()
        for call in calls:
            call.checks.states = AttributeChanges(())
            call.recorder.earlier = EarlierCalls()
            call._variables = copy_context()
            call.forget_record()
        self._calls.clear()
        drop_tensors([call._kept for call in calls])


def _reason_of(error: BaseException) -> str:
    """Say why forward is followed no further, and where."""
    if isinstance(error, NeedsRealValues):
        return "the model reads tensor values, and its weights have none"
    return f"{error.what.rstrip(' ,')} {error.place}".rstrip(" ,") if isinstance(error, Untraceable) else str(error)
