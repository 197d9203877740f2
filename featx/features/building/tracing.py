"""Trace a model for feature extraction: on an example or symbolically, no further than the request needs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featx.errors import ArgumentTypeError, FeatxError, NodeNameError, TraceError
from featx.examples import Example, other_guesses, refused_guess
from featx.features.building.feature_tracer import FeatureTracer, check_model
from featx.features.building.model_inputs import ModelInputs
from featx.features.building.tracing_options import TracerName, TracingOptions
from featx.features.describing.known_model import KnownModel
from featx.features.describing.other_sizes import OtherSizes
from featx.features.requests.request import OUTPUT
from featx.ir.equality import is_same_graph
from featx.ir.graph import Graph
from featx.tracing.checks.checked_trace import trace_checked, trace_recording_mode_reads
from featx.tracing.checks.other_calls import does_the_same_after
from featx.tracing.checks.symbolic_repetition import SymbolicRepetition
from featx.tracing.example.conditions import RequestedNodeFinder
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.freedom.other_mode import OtherMode
from featx.tracing.replica.interception import has_backward_hooks, has_own_call
from featx.tracing.replica.mode_reads import ModeReads
from featx.tracing.replica.model_context import ModelContext, refuse_uninitialized
from featx.tracing.replica.replica import modes_after_train, only_sets_flags, replica_of, view_in_mode
from featx.tracing.sizes.outcomes import FreeDims


@dataclass(frozen=True)
class EarlyEnd:
    """Where forward of a model can be followed no further.

    Attributes:
        reason: why, and at which line.
        path: the innermost module in which that is.
    """

    reason: str
    path: str

    def describe(self, model: nn.Module) -> str:
        """Say for the user what is left out."""
        return (
            f"forward of {type(model).__name__} cannot be followed to its end, and what it computes from here on has "
            f"no names: {self.reason}"
        )


class ModelTracing:
    """How one model is traced: with which tracer, policy and example.

    Args:
        model: what to trace.
        options: how.

    Attributes:
        edits: as in the options.
        starts: as in the options.
        known_model: facts of the model that hold in both modes.
        modules: its modules, by path.
        inputs: those on which it is traced.
        tracer: which tracer is used.
        training: the mode in which it is traced; None for the modes in which its modules are. See `in_mode`.
        ends: where forward could be followed no further, by mode, in graphs that need not reach its end.

    Raises:
        ArgumentTypeError: `model` is not a module, or an option has the wrong type or an unknown name.
    """

    def __init__(self, model: nn.Module, options: TracingOptions) -> None:
        self.model = check_model(model)
        options.check()
        self.options = options
        self.edits = options.edits
        self.starts = options.starts
        self.known_model = KnownModel(self.model)
        self.modules = self.known_model.modules
        self.training: bool | None = None
        self.ends: dict[bool | None, EarlyEnd] = {}
        self._reads: ModeReads | None = None
        self._feature_tracer()  # a wrong option is refused before anything runs
        self.inputs = ModelInputs(self.model, options.example_inputs, options.concrete_args)
        self.tracer = self._chosen_tracer()
        self._ended_early = False
        self._other_sizes: tuple[Graph, OtherSizes] | None = None
        # What is known from a trace in the other mode; where modules do more than set flags, nothing.
        self._context: ModelContext | None = None
        self._is_known = all(map(only_sets_flags, self.modules.values()))
        # The model in other modes, to be asked.
        self._views: dict[bool, nn.Module] = {}
        # What the traces of a first mode found out.
        self._other_mode = OtherMode()

    def _chosen_tracer(self) -> TracerName:
        tracer, given = self.options.tracer, self.inputs.given
        if given is not None and tracer == "symbolic":
            raise ArgumentTypeError("example_inputs are of no use to tracer='symbolic'; leave one of them out")
        return "symbolic" if self.options.concrete_args is not None and tracer == "auto" and given is None else tracer

    @contextmanager
    def in_mode(self, training: bool | None) -> Generator[None]:
        """Trace in another mode in the `with` block: train, eval, or None for the modes in which the modules are."""
        before, self.training = self.training, training
        try:
            yield
        finally:
            self.training = before

    @contextmanager
    def recording_mode_reads(self) -> Generator[ModeReads]:
        """Observe in each trace of the `with` block whether any code asks in which mode a module is."""
        reads = self._reads = ModeReads()
        try:
            yield reads
        finally:
            self._reads = None

    def _feature_tracer(self, request: Iterable[str] = ()) -> FeatureTracer:
        try:
            tracer = FeatureTracer(**(self.options.tracer_kwargs or {}))
        except TypeError as error:
            raise ArgumentTypeError(
                "tracer_kwargs may have autowrap_modules, autowrap_functions, param_shapes_constant and leaf_modules: "
                f"{error}"
            ) from error
        tracer.requested = frozenset(request)
        if OUTPUT in tracer.requested and OUTPUT not in self.modules:
            tracer.requested |= {""}
        tracer.own_output = frozenset() if self.edits is None else frozenset(self.edits.names)
        tracer.training, tracer.reads = self.training, self._reads
        if self.options.opens_operators:
            tracer.open_operators()
        if self.options.opens_stacks:
            tracer.open_stacks()
        return tracer

    def new_tracer(self, request: Iterable[str] = (), opened: frozenset[str] | None = None) -> ExampleTracer:
        """Return a tracer that follows an example.

        Args:
            request: names that are asked for.
            opened: the paths of the modules to look into; None for all but leaves.
        """
        tracer = self._feature_tracer(request).on_example(opened)
        tracer.model_context = self._context
        tracer.check_sizes = self.options.check_sizes
        tracer.inputs_are_guessed = self.inputs.given is None
        # A case of its own is traced for a size that comes up in the training of a detection model.
        tracer.runs_sizes_for_real = not (self.training and self.inputs.is_for_one_mode)
        return tracer

    def drop(self) -> None:
        """Drop what traces in one mode have kept for one in the other."""
        self._other_mode.drop()

    def note(self, trace: ExampleTrace) -> None:
        """Keep what a trace knows of the model for the next one, and whether it has ended early."""
        if self._is_known:
            self._context = trace.model_context
        self._ended_early = self._ended_early or trace.early_stop_reason is not None

    def other_sizes(self, graph: Graph, root: nn.Module) -> OtherSizes | None:
        """Return what becomes of the values of a graph of `root` at other sizes; None without an example.

        What was found with an equal graph, for the other mode, is not looked for again.
        """
        example = self.inputs.used
        if example is None:
            return None
        other = OtherSizes(lambda: graph, root, example, self.inputs.image)
        if self._other_sizes is not None and is_same_graph(self._other_sizes[0], graph):
            other.take_over(self._other_sizes[1])
        self._other_sizes = graph, other
        return other

    def _trace_symbolically(self, request: Iterable[str]) -> Graph:
        # Symbols go through `forward` alone, as in torch.fx.
        if self.model._forward_pre_hooks or has_own_call(type(self.model)):
            name = type(self.model).__name__
            raise TraceError(
                f"{name} has a forward pre-hook or a __call__ of its own, which a symbolic trace leaves out although "
                "all features follow from it; give example_inputs, or put that code into forward"
            )
        tracer = self._feature_tracer(request)
        if "" in tracer.requested and has_backward_hooks(self.model):
            raise TraceError(
                f"{type(self.model).__name__} has backward hooks, which a graph of it would leave out; remove "
                "these hooks first, or do not ask for what the model returns"
            )
        if self.options.makes_values:
            tracer.new_comparison, tracer.refuses_questions = SymbolicRepetition, True
        try:
            return tracer.trace(self.model, self.inputs.fixed)
        except FeatxError:
            raise
        except Exception as error:  # the model's own
            left_out = self.inputs.names_left_out()
            if not left_out:
                raise
            raise TraceError(
                f"cannot trace {type(self.model).__name__} symbolically: {type(error).__name__}: {error}. Its inputs "
                f"{', '.join(left_out)} are None there, as forward has it; give example_inputs, such as "
                f"example_inputs={{'{left_out[0]}': ...}}"
            ) from error

    def _trace_without_inputs(self, request: Iterable[str]) -> Graph:
        # Names alone need no parameters. A lazy module initializes its own in a forward pre-hook.
        if self.options.makes_values or self.model._forward_pre_hooks:
            refuse_uninitialized(self.model)
        try:
            return self._trace_symbolically(request)
        except TraceError as error:
            if self.tracer == "symbolic" or "example_inputs" in str(error):
                raise
            raise type(error)(
                f"it is not known which inputs {type(self.model).__name__} takes; give example_inputs (a tensor, a "
                f"tuple or a dict), with which all that Python decides is followed. Without them: {error}"
            ) from error

    def example(self) -> Example | None:
        """Return the inputs to follow; None for a symbolic trace."""
        if self.tracer == "symbolic":
            return None
        training = self.model.training if self.training is None else self.training
        example = self.inputs.find(training, starts_inside=self.starts is not None)
        if example is None and self.tracer == "example":
            raise TraceError(
                f"{type(self.model).__name__} does not declare its inputs; pass "
                "example_inputs=torch.rand(1, 3, 224, 224), say, or a tuple or a dict of inputs"
            )
        return example

    def model_in_mode(self) -> nn.Module:
        """Return the model as it is in the mode in which it is traced, to be asked and not to be run."""
        if self.training is None:
            return self.model
        if self.training not in self._views:
            self._views[self.training] = self._view(self.training)
        return self._views[self.training]

    def _view(self, training: bool) -> nn.Module:
        if self._is_known and all(each.training is training for each in self.modules.values()):
            return self.model
        if self._is_known and not any(isinstance(each, torch.jit.ScriptModule) for each in self.modules.values()):
            return view_in_mode(self.model, training)
        return replica_of(self.model, training).root

    def flags(self, training: bool | None = None) -> dict[str, bool]:
        """Return which mode each submodule is in, or would be in after `train(training)`, by path; the model has ""."""
        if training is None:
            return {path: module.training for path, module in self.modules.items()}
        if self._is_known:
            return dict.fromkeys(self.modules, training)
        return modes_after_train(self.model, training)

    def graph(self, request: Iterable[str] = (), *, keep_source: bool = False, may_end_early: bool = False) -> Graph:
        """Return the graph of everything that the model does in the mode `training`.

        Args:
            request: the paths of modules; what they return is marked in the graph.
            keep_source: note the line of the model in `node.meta["source"]`, if an example is followed.
            may_end_early: return what forward has done up to a place where it cannot be followed; see `ends`.

        Raises:
            TraceError: the model cannot be traced; the message says where and what to do.
        """

        def follow(example: Example) -> Graph:
            tracer = self.new_tracer(request)
            tracer.keep_source, tracer.may_end_early = keep_source, may_end_early
            trace = tracer.trace(self.model, *_inputs(example))
            self.note(trace)
            self.ends.pop(self.training, None)
            if trace.early_stop_reason is not None:
                self.ends[self.training] = EarlyEnd(trace.early_stop_reason, trace.module_calls.failed_module_path)
            return trace.graph

        return self.follow_or_trace_symbolically(follow, request)

    def does_the_same_after(self, earlier: Example, *, switches_mode: bool) -> bool:
        """Say whether forward does the same with the example after a call with `earlier`; False if that is not known.

        All modules are looked into. With `switches_mode` the call before is one in the other of train and eval mode.
        """
        example = self.example()
        if example is None:
            return False
        tracer = self.new_tracer()
        return does_the_same_after(tracer, self.model, _inputs(example), _inputs(earlier), switches_mode=switches_mode)

    def checked(
        self, tracer: ExampleTracer, example: Example, find_requested: RequestedNodeFinder
    ) -> tuple[ExampleTrace, FreeDims]:
        """Return a trace that is compared with further runs, and which sizes they found free.

        What the traces of a first mode found out is not looked for again in the other one.
        """
        known = self._other_mode
        known.on_earlier_inputs = self.options.earlier_dims.get(
            self.model.training if self.training is None else self.training
        )
        if known.graph is not None or known.dims or example.is_for_one_mode or not self._is_known:
            return trace_checked(tracer, self.model, *_inputs(example), find_requested, known)
        result = trace_recording_mode_reads(tracer, self.model, *_inputs(example), find_requested, known)
        if known.reads is not None and known.reads.decides:
            known.forget()
        known.reads = None
        return result

    def follow_or_trace_symbolically(self, follow: Callable[[Example], Graph], request: Iterable[str] = ()) -> Graph:
        """Trace on an example where there is one, else symbolically; and so where the model takes no guessed example.

        What cannot be followed on an example, such as a seed that forward sets, a symbolic trace would not notice.
        """
        example = self.example()
        if example is None:
            graph = self._trace_without_inputs(request)
            self.inputs.missing = f"no inputs for forward({', '.join(self.inputs.names)}) are known"
            return graph
        self._ended_early = False
        try:
            graph = follow(example)
            # The model may have failed after what is requested.
            other = self._guess_that_runs(example) if self._ended_early and example is self.inputs.guessed else None
            if other is None:
                return graph
            self._retry_with(other)
            return follow(other)
        except NodeNameError:
            raise
        except Exception as error:
            if example is self.inputs.given or self.tracer == "example":
                if not isinstance(error, FeatxError):
                    self.inputs.note_on(error, example, request)
                raise
            if isinstance(error, FeatxError) and not self._fails_on(example, error):
                raise refused_guess(self.model, example.source, error) from error
            other = self._guess_that_runs(example)
            if other is not None:
                self._retry_with(other)
                return self.follow_or_trace_symbolically(follow, request)
            try:
                graph = self._trace_symbolically(request)
                self.inputs.note_failure(example, error)
                return graph
            except NodeNameError:
                raise
            except Exception:  # the model's own too, which may be the same
                raise refused_guess(self.model, example.source, error) from error

    def _retry_with(self, example: Example) -> None:
        """Take other inputs for all further traces, which know nothing of those on the ones before."""
        self.inputs.guessed = example
        self._context = None
        self._other_mode.drop()
        self._other_mode = OtherMode()

    def _guess_that_runs(self, failed: Example) -> Example | None:
        """Return other inputs for the layer that gave those on which a trace has failed, if only they fit the model."""
        guesses = other_guesses(self.model, bool(self.training))
        other = next(guesses, None)
        if failed.is_other_guess or other is None or other.source != failed.source:
            return None
        error = self._error_on_forms(failed)
        if error is None or "meta" in str(error):  # another reason: code that cannot be followed, or asks for values
            return None
        while other is not None and self._error_on_forms(other) is not None:
            other = next(guesses, None)
        return None if other is None else replace(other, is_other_guess=True)

    def _error_on_forms(self, example: Example) -> Exception | None:
        tracer = self.new_tracer()
        tracer.model_context = None
        return tracer.error_on_forms(self.model, *_inputs(example))

    def _fails_on(self, example: Example, error: FeatxError) -> bool:
        """Say whether an error of a trace comes from one of the model, which takes no such inputs."""
        causes: list[BaseException] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        # Signals of a trace are no Exceptions.
        is_of_model = isinstance(causes[-1], Exception) and not isinstance(causes[-1], FeatxError)
        return is_of_model and not self.new_tracer().runs_untraced(self.model, *_inputs(example))


def _inputs(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return example.args, example.kwargs
