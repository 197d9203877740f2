"""ExampleTracer: run `forward` on an example, and record the graph of what it really does.

Tensors stay tensors: every torch call passes through a `TorchFunctionMode`, which runs it on stand-ins without values
and knows a tensor by its identity. Sizes are traced numbers. What Python decides becomes a guard. Where the model asks
for a value, the trace starts again with real tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from featx.errors import FeatxError, TraceError
from featx.tracing.calls.opening import LeafPolicy, Opening
from featx.tracing.environment.raised_errors import free_frames
from featx.tracing.environment.thread_modes import ThreadModes
from featx.tracing.example.conditions import Conditions, RequestedNodeFinder
from featx.tracing.example.earlier_caches import caches_filled_before
from featx.tracing.example.plain_run import run_plainly
from featx.tracing.example.run_setup import RunSetup
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.inputs.dict_inputs import without_unread_items
from featx.tracing.log import RunLog
from featx.tracing.nodes.leaf_classes import is_leaf_class
from featx.tracing.replica.mode_reads import ModeReads
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.signals import (
    GAVE_UP,
    KEEP_WHOLE_ADVICE,
    REQUEST_EARLIER_ADVICE,
    Diverged,
    InternalTraceError,
    NeedsHooks,
    NeedsRealValues,
    PossibleThreadInterference,
    Restart,
    ThreadInterference,
    Untraceable,
    error_that_refuses,
)
from featx.tracing.source.frames import comes_from_featx, line_of, user_frame
from featx.tree import tensors_in, tree_map

# Of which dimensions of the inputs it is found out whether the graph holds at other lengths.
CheckSizes = Literal["full", "batch", "none"]
# How often a trace that other threads disturbed runs again.
ATTEMPTS = 10


class ExampleTracer:
    """Traces a module or function on an example.

    Args:
        is_leaf: says, for a module and its path, whether a call of it is one node. By default modules of torch.nn are.
        autowrap_modules: Python modules whose functions are recorded as one node each.
        autowrap_functions: functions that are recorded as one node each.
        opened: the paths of the modules that are traced through; all others are one node each, whatever `is_leaf` says,
            which then only decides how nodes are numbered. By default what `is_leaf` says.
        requested: the paths of modules whose outputs are marked.
        own_output: those whose output gets a node of its own: an edit replaces it, not the same tensor elsewhere.
        keep_source: note the line of the model in `node.meta["source"]`.
        keep_output: return what the root returns; otherwise the graph returns None, and the output may be of any kind.
        training: trace the model as it is in train mode, or in eval mode; by default in the modes in which it is.
        follows_wrapped: follow functions that their Python module has marked with `wrap`, which are one node else.
    """

    def __init__(
        self,
        is_leaf: LeafPolicy | None = None,
        autowrap_modules: tuple[ModuleType, ...] = (math,),
        autowrap_functions: tuple[Callable[..., Any], ...] = (),
        *,
        opened: frozenset[str] | None = None,
        requested: frozenset[str] = frozenset(),
        own_output: frozenset[str] = frozenset(),
        keep_source: bool = False,
        keep_output: bool = True,
        training: bool | None = None,
        follows_wrapped: bool = False,
    ) -> None:
        self.is_leaf = is_leaf or (lambda module, path: is_leaf_class(type(module)))
        self.opened = opened
        self.requested = requested
        self._own_output = own_output
        self._autowrap = (tuple(autowrap_modules), tuple(autowrap_functions))
        self._follows_wrapped = follows_wrapped
        # What another trace knew of the same model, if that was not changed since; otherwise each trace finds it out.
        self.model_context: ModelContext | None = None
        self.keep_source = keep_source
        self.keep_output = keep_output
        self.training = training
        # Of which dimensions of the inputs other lengths are tried; and whether a model that runs for real on the
        # example does so for other lengths too.
        self.check_sizes: CheckSizes = "full"
        self.runs_sizes_for_real = True
        # Whether a trace may end where forward can no longer be followed. Its graph returns nothing then.
        self.may_end_early = False
        # Whether the example was guessed: values that follow from it are arbitrary.
        self.inputs_are_guessed = False
        # Observes whether code of the model asks in which mode a module is.
        self.reads: ModeReads | None = None
        # Why modules are kept whole that would be looked into, by path, as earlier traces have found out.
        self.opaque_reasons: dict[str, str] = {}
        # Whether modules with forward hooks are looked into, because forward reads what the hooks store.
        self.opens_hooked = False
        # Whether replicas outlive their runs; see `keeping_replicas`.
        self.keeps_replicas = False
        # Whether each call is observed, for those that set torch's generator or hand work to another thread, since
        # other threads have disturbed a trace; and whether they may have.
        self.uses_profile_hook = self._may_be_disturbed = False
        # Whether calls are observed that set or ask for the state of autocast.
        self.observes_autocast = False
        # Whether graphs check whether gradients are enabled, since code asks for it that is not seen to ask.
        self.checks_gradient_mode = False
        # Attributes, by path and name, that are taken away for the runs: a trace notes those that forward reads.
        self.absent: frozenset[tuple[str, str]] = frozenset()
        # Attributes that must not be taken away: a second call reads them before it assigns them.
        self.read_first: set[tuple[str, str]] = set()
        # Whether code reads counts that its source did not show it to read.
        self.stored_are_read = False
        # Whether the model is traced as if it had not run before, as far as that is the same.
        self.forgets_caches = True
        self.has_forgotten_caches = False
        # How many elements all runs for real have computed, those that failed too.
        self.computed = 0
        self.log = RunLog()

    @property
    def is_as_made(self) -> bool:
        """Whether no trace has found that later ones need another setup."""
        found = (
            self.opaque_reasons
            or self.opens_hooked
            or self.read_first
            or self.stored_are_read
            or self.uses_profile_hook
            or self.observes_autocast
            or self.checks_gradient_mode
        )
        return not found and self.forgets_caches

    def _opening(self, first: ExampleTrace | None) -> Opening:
        # What the first call has kept whole stays so, or it would be compared with what is inside it.
        reasons = self.opaque_reasons if first is None else {**self.opaque_reasons, **first.opaque_reasons}
        return Opening(self.is_leaf, self.opened, self.requested, self._own_output, reasons, self.opens_hooked)

    def trace(
        self,
        root: nn.Module | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        find_requested: RequestedNodeFinder | None = None,
    ) -> ExampleTrace:
        """Run `root(*args, **kwargs)` and return what was recorded.

        Nothing is computed, unless the model asks for values, or has kept something in an earlier call that may be a
        cache (see `caches_filled_before`); then it runs on the example for real. What runs is a replica: the model is
        only read, and the inputs are copied. Where something fails, `find_requested` is called with the graph so far
        and the path of the innermost module that failed; if all that is requested is there, the trace ends there.

        Raises:
            TraceError: what the root module itself does cannot be followed; the message says where and what to do.
        """
        args, kwargs = without_unread_items(root, args, kwargs)
        context = self.context(root, args, kwargs)
        if context.caches_before is None:
            context.caches_before = caches_filled_before(context, args, kwargs) if self.forgets_caches else {}
        self.has_forgotten_caches = bool(context.caches_before)
        is_without_values = any(value.is_meta for value in tensors_in((args, kwargs)))
        # Gradients are on whatever the caller has, or a `no_grad` of the model would change nothing and not be seen;
        # but some models run without only.
        gradients = (True,) if torch.is_grad_enabled() else (True, False)
        errors: list[Exception] = []
        for is_real in (False,) if is_without_values else (False, True):
            for enabled in gradients:
                try:
                    conditions = Conditions("the example", is_real, enabled)
                    return self.run_once(context, args, kwargs, find_requested, conditions)
                except FeatxError:
                    raise
                except NeedsRealValues as error:
                    if is_real or is_without_values:
                        whose = "its weights have" if is_real else "the example has"
                        raise error_that_refuses(
                            context.name, f"the model reads tensor values, and {whose} none"
                        ) from error
                    break
                except Exception as error:
                    if isinstance(error, NameError) and comes_from_featx(error):
                        raise  # a bug, and no word of the model
                    errors.append(error)
        if not is_without_values and self.runs_untraced(root, args, kwargs):
            if context.hooked and not self.opens_hooked:
                self.opens_hooked = True
                return self.trace(root, args, kwargs, find_requested)
            what = f"forward raises {errors[-1]!r} in a trace alone: it may read what a forward hook stores,"
            raise error_that_refuses(context.name, what) from errors[-1]
        raise errors[-1]

    @contextmanager
    def keeping_replicas(self) -> Generator[None]:
        """Let replicas outlive their runs, so that another call can come; `drop_replica` ends that."""
        self.keeps_replicas = True
        try:
            yield
        finally:
            self.keeps_replicas = False

    @contextmanager
    def keeping_caches(self) -> Generator[None]:
        """Trace with the caches that the model has filled, since a trace without them has failed."""
        self.forgets_caches = self.has_forgotten_caches = False
        context = self.model_context
        before = None if context is None else context.caches_before
        if context is not None:
            context.caches_before = {}
        try:
            yield
        except BaseException:
            if context is not None:
                context.caches_before = before
            raise

    def context(self, root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModelContext:
        """Return what is known of the model: of earlier traces, if they have left it, else anew."""
        return self.model_context or ModelContext(
            root, (args, kwargs), *self._autowrap, follows_wrapped=self._follows_wrapped
        )

    def runs_untraced(self, root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Say whether the model runs on the example where nothing is recorded; on the meta device, no."""
        context = self.context(root, args, kwargs)
        replica, tensors = context.replica(self.training, "all")
        if any(tensor.is_meta for tensor in tensors.all):
            return False
        with self.log.run(context.name, "the example, with nothing recorded", is_real=True):
            run = run_plainly(context, replica.root, args, kwargs)
        replica.drop()
        return run.error is None

    def error_on_forms(self, root: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
        """Return what the model raises where all tensors have forms and no values; None if it runs."""
        context = self.context(root, args, kwargs)
        replica, _ = context.replica(self.training, "forms")
        args, kwargs = tree_map(
            lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        with self.log.run(context.name, "inputs of another form", is_real=False):
            run = run_plainly(context, replica.root, args, kwargs)
        replica.drop()
        return run.error

    def run_once(
        self,
        context: ModelContext,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        find_requested: RequestedNodeFinder | None,
        conditions: Conditions,
    ) -> ExampleTrace:
        """Trace under some conditions and no others; see `trace`.

        Raises:
            NeedsRealValues: the model asks for a value that its tensors do not have. It is no Exception.
            Diverged: it does not do what it did in `conditions.earlier`. It is no Exception either.
            TraceError: something cannot be followed.
        """
        modes = ThreadModes()
        try:
            try:
                trace = self._run_until_done(context, args, kwargs, find_requested, conditions)
                if not self.keeps_replicas or conditions.drops_replica:
                    trace.drop_replica()
            except KeyboardInterrupt as error:
                free_frames(error)
                raise
            except (ThreadInterference, *GAVE_UP) as error:
                if conditions.is_further:  # whoever asked for it goes on without it
                    free_frames(error)
                raise
            finally:
                modes.leave()
        finally:
            modes.leave()  # again: an interrupt may have ended the first one
        return trace

    def _run_until_done(
        self,
        context: ModelContext,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        find_requested: RequestedNodeFinder | None,
        conditions: Conditions,
    ) -> ExampleTrace:
        """Run again for as long as a run finds out that something has to be set up differently."""
        before = conditions.before
        first = before or conditions.earlier
        setup = RunSetup(
            "buffers" if conditions.is_real else "none",
            {*(self.absent if first is None else first.checks.absent)},
            {*self.read_first, *(() if first is None else first.checks.read_first)},
            share_stand_ins=first is not None and first.inputs.share_stand_ins,
        )
        attempts = ATTEMPTS
        line = line_of(user_frame())
        while True:
            replica = (before.replica, before.tensors) if before else context.replica(self.training, setup.copied)
            trace = ExampleTrace(self, self._opening(first), context, replica, conditions)
            trace.inputs.share_stand_ins = setup.share_stand_ins
            trace.checks.absent, trace.checks.read_first = setup.absent, setup.read_first
            trace.checks.stored_are_read = self.stored_are_read
            try:
                with self.log.run(context.name, conditions.reason, is_real=conditions.is_real):
                    try:
                        trace.run(args, kwargs, find_requested)
                    finally:
                        self.computed += trace.computed
                if trace.is_large:
                    context.follow_all_conversions()
                return trace
            except (AttributeError, AssertionError, NameError) as error:  # by forward, or by a mistake in featx
                if before is None and setup.put_back_missing(error):
                    continue
                if conditions.is_further and comes_from_featx(error):
                    raise InternalTraceError(error) from error
                raise
            except Untraceable as error:
                # What is found when forward is over has no line of the model.
                place = error.place if error.line != line else ""
                advice = error.advice or KEEP_WHOLE_ADVICE
                if place and find_requested is None and trace.has_calls:
                    advice += f", {REQUEST_EARLIER_ADVICE}"
                raise error_that_refuses(context.name, error.what, place, advice) from error
            except Restart as error:
                if before is not None:  # a call that has been broken off cannot come again on the same replica
                    raise Diverged from error
                self.opens_hooked = self.opens_hooked or isinstance(error, NeedsHooks)
                setup.change(error, context)
                if trace.is_large:
                    context.follow_all_conversions()
            except ThreadInterference as error:
                self._note_interference(error)
                if before is not None:  # its replica has been called by then
                    raise
                attempts -= 1
                if not attempts:
                    raise TraceError(f"cannot trace {context.name} while other threads run: {error}") from error

    def _note_interference(self, error: ThreadInterference) -> None:
        """Observe all calls in later runs, if this one was disturbed for sure, or may have been for the second time."""
        is_sure = not isinstance(error, PossibleThreadInterference) or self._may_be_disturbed
        self.uses_profile_hook, self._may_be_disturbed = self.uses_profile_hook or is_sure, True
