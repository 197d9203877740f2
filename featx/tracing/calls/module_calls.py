"""Calls of modules: which a trace on an example looks into, and which are one node each."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from typing import Any, cast

import torch
from torch import nn

from featx.errors import FeatxError
from featx.libraries import only_delegates_call
from featx.tracing.calls.checkpoint import Checkpoint
from featx.tracing.calls.measured_calls import MeasuredCalls
from featx.tracing.calls.opening import Opening
from featx.tracing.calls.torch_calls import TorchCalls
from featx.tracing.calls.whole_modules import WholeModules, assigned_in_forward
from featx.tracing.guards.forms import attributes_given_to
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.history.lineage import Part
from featx.tracing.model_state.module_state import parts_of, replaced_part
from featx.tracing.nodes.module_output import add_apart, mark_output
from featx.tracing.nodes.scope import Scope, requested_by
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.interception import has_backward_hooks, has_own_call
from featx.tracing.replica.replica import Replica
from featx.tracing.side_effects.state_checks import StateChecks
from featx.tracing.signals import (
    ModifiedFromOutside,
    RunsOnOtherParameters,
    UnsupportedSideEffect,
    UnsupportedValue,
    Untraceable,
)
from featx.tree import tree_leaves


class ModuleCalls:
    """What one trace does with the calls of modules.

    Args:
        recorder: makes the nodes.
        torch_calls: what runs inside of modules that are looked into.
        measured: runs those that are not.
        checks: compares modules with what they were.
        replica: the modules.
        opening: which of them are looked into.

    Attributes:
        failed_module_path: the path of the innermost module in which the trace broke off, or "".
        whole: the calls that are one node each.
        requested_calls: how many calls have begun of which the output was asked for, by the path that was asked for.
    """

    def __init__(
        self,
        recorder: Recorder,
        torch_calls: TorchCalls,
        measured: MeasuredCalls,
        checks: StateChecks,
        replica: Replica,
        opening: Opening,
    ) -> None:
        self._recorder = recorder
        self._torch_calls = torch_calls
        self._measured = measured
        self._checks = checks
        self._replica = replica
        self._opening = opening
        self._thread = get_ident()
        self.failed_module_path = ""
        self.requested_calls: Counter[str] = Counter()
        self.whole = WholeModules(recorder, measured, checks, replica, opening)
        checks.states.note_opened(replica.root, assigned_in_forward(replica.root))

    def on_call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of a module: one node, or whatever its forward does."""
        recorder = self._recorder
        if get_ident() != self._thread:
            return self._call_in_other_thread(forward, args, kwargs)
        if recorder.opaque_call.is_inside:
            return self.whole.call_inside(module, forward, args, kwargs)
        recorder.raised.check()
        self._torch_calls.check_unrecorded()
        self._torch_calls.check_switches()
        frame = recorder.model_frame()
        if frame is not None:
            recorder.note_code(frame, "a module is called")
            if frame.f_code.co_exceptiontable and _refuses_arguments(module, args, kwargs):
                return forward(*args, **kwargs)  # raises a TypeError, which `except TypeError` may wait for
        path = recorder.path_of_module(module)
        caller = recorder.scope
        for requested in requested_by(path, self._opening.requested, caller.stack):
            self.requested_calls[requested] += 1
        recorder.scope = Scope(path, type(module), caller.stack)
        try:
            return self._open_or_keep_whole(module, path, forward, args, kwargs, caller)
        except BaseException as error:
            self.failed_module_path = self.failed_module_path or path
            if isinstance(error, Exception):
                recorder.raised.note_failure(error)
            raise
        finally:
            recorder.scope = caller

    def _call_in_other_thread(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opaque_call = self._recorder.opaque_call
        if opaque_call.is_inside:
            opaque_call.note_untracked_write()  # perhaps: kernels of other threads are not observed
        else:
            self._torch_calls.refuse_other_threads()
        return forward(*args, **kwargs)

    def _open_or_keep_whole(
        self,
        module: nn.Module,
        path: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: Scope,
    ) -> Any:
        is_leaf = self._is_leaf(module, path)
        if self._is_one_node(module, path, is_leaf) and not _returns_given_object(module, args):
            try:
                return self.whole.call(module, path, args, kwargs, caller, is_leaf=is_leaf)[1]
            except (UnsupportedValue, ModifiedFromOutside):  # a cache that forward has made, `block.height = height`
                if self._opening.opened is None or is_leaf:
                    raise
            except RunsOnOtherParameters:
                pass  # its forward reads them
            self._recorder.raised.forget()
        return self._open(module, path, forward, args, kwargs, caller)

    def end(self) -> None:
        """Put back the attributes whose reads were noticed."""
        self.whole.reveal()

    def check_missing(self, error: BaseException) -> None:
        """Raise where an error of forward may come from a forward hook that did not run."""
        may_miss = isinstance(error, (LookupError, AttributeError, RuntimeError)) and not isinstance(error, FeatxError)
        if may_miss and any(map(self._measured.has_hooks, self._checks.opaque_paths)):
            self._recorder.hooks.refuse_stored(f"or something else is missing ({error!r}),")

    def _is_one_node(self, module: nn.Module, path: str, is_leaf: bool) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            return True
        if has_own_call(type(module)):
            return False  # what it does before forward is recorded by now, and must not run twice
        if self._opening.opens_hooked and self._measured.has_hooks(path):
            return False
        opened = self._opening.opened
        return is_leaf if opened is None else path not in opened

    def _is_leaf(self, module: nn.Module, path: str) -> bool:
        # A policy may know the modules of the model by identity.
        return self._opening.is_leaf(self._replica.originals.get(module, module), path)

    def _may_stay_opaque(self, module: nn.Module) -> bool:
        """Say whether a module may be kept whole where it cannot be followed."""
        kind = type(module)
        return self._opening.opened is None and (not has_own_call(kind) or only_delegates_call(kind))

    # -- modules that are looked into --------------------------------------------------------------------------------

    def check_root(self, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, needs_output: bool) -> None:
        """Raise Untraceable where a graph of what is inside of the root would not do what a call of it does."""
        if isinstance(root, nn.Module):
            if needs_output:
                _check_gradient_hooks(root, "")
            _check_packing(root, "", args, kwargs)

    def _open(
        self,
        module: nn.Module,
        path: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: Scope,
    ) -> Any:
        recorder = self._recorder
        self.whole.reveal(module)
        self._measured.context.check_plain_values()  # those that the code around the call has changed
        attempt = Checkpoint(recorder, self._checks, self._torch_calls)
        changed, parts = self._checks.states.changed_by_others(module), parts_of(module)
        replaced_outside = self._checks.states.replaced_by_others(module)
        children = self._checks.children_of(module)
        changed_outside = self._measured.changed_for_call() if self._may_stay_opaque(module) else None
        if changed is not None or changed_outside is not None:
            self._checks.note_changed_outside(path)
        try:
            if path in self._opening.opaque_reasons:
                raise Untraceable(self._opening.opaque_reasons[path])
            _check_gradient_hooks(module, path)
            self._take_parts((args, kwargs), caller)
            _check_packing(module, path, args, kwargs)
            self._checks.states.note_opened(module, assigned_in_forward(module))
            with self._checks.in_progress(module):
                result = forward(*args, **kwargs)
            recorder.raised.check()
            if not isinstance(result, (tuple, list, dict)):
                self._take_parts(result, attempt.scope)
            replaced = replaced_part(module, parts)
            if replaced is not None:
                raise UnsupportedSideEffect(f"forward replaces '{replaced}' of '{path}', and a graph does not,")
            self._checks.check_children(children, were_changed=changed is not None)
            self._checks.check(module)
            self._checks.opened_modules.add(module)
            # The path of a layer means its first call, also where it is looked into for what its hooks store.
            is_meant = self.requested_calls[path] < 2 or not self._is_leaf(module, path)
            result = self._marked(result, path, caller) if is_meant else result
            attempt.release()
            return result
        except Untraceable as error:
            recorder.raised.raise_behind(error)
            if not self._may_stay_opaque(module) or (recorder.hooks.are_run and self._is_leaf(module, path)):
                raise  # a layer is looked into for what its hooks store alone
            if changed is None and changed_outside is None:
                changed = replaced_outside
            if changed is not None or changed_outside is not None:  # a graph that calls it does not change that
                what = f"{changed_outside} for" if changed is None else f"the attribute '{changed}' of or inside"
                raise ModifiedFromOutside(
                    f"forward changes {what} '{path}', which is kept whole ({error.what.rstrip(' ,')}),"
                ) from error
            # The nodes that were recorded inside are erased, and the module becomes one node.
            recorder.raised.forget()
            attempt.roll_back(module)
            self._measured.accept_outer_values()
            self._torch_calls.unrecorded, self.failed_module_path = None, ""
            return self._keep_whole(module, path, args, kwargs, caller, error.what)

    def _keep_whole(
        self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], caller: Scope, why: str
    ) -> Any:
        """Record the call of a module as one node although it was to be looked into; return what it returns."""
        whole = self.whole
        counts_inside, whole.counts_inside = whole.counts_inside, True
        try:
            node, result = whole.call(module, path, args, kwargs, caller, is_leaf=self._is_leaf(module, path))
        finally:
            whole.counts_inside = counts_inside
        node.meta["opaque_because"] = why
        return result

    def _marked(self, result: Any, path: str, caller: Scope) -> Any:
        """Mark in the graph what a module has returned that was looked into, where that is asked for or edited."""
        recorder = self._recorder
        if path in self._opening.own_output and isinstance(result, (torch.Tensor, tuple, list, dict)):
            value = recorder.create_result(result, is_unnamed=True)
            return self._measured.apart(result, add_apart(recorder.graph, value, path))
        if requested_by(path, self._opening.requested, caller.stack):
            mark_output(recorder.graph, recorder.create_result(result, is_unnamed=True), path)
        return result

    def _take_parts(self, values: Any, scope: Scope) -> None:
        """Make nodes, in `scope`, of the parts among `values`, which pass into a module or out of it.

        They are named by the module that has taken them, whether the other one is traced through or not.
        """
        recorder = self._recorder
        for value in tree_leaves(values):
            is_number = isinstance(value, TracedNumber)
            is_own = is_number and value.trace is recorder.numbers
            origin = value.origin if is_own else recorder.lineage.get(value)
            if not isinstance(origin, Part) or (origin.node is not None and not origin.node.is_erased):
                continue
            with recorder.in_scope(scope):
                recorder.node_of(origin)


def _returns_given_object(module: nn.Module, args: tuple[Any, ...]) -> bool:
    """Say whether a call of `nn.Identity` returns a list, a dict, or a tensor with attributes: the very same object.

    A graph would go on with another one, in which code does not find what it does to the first one later.
    """
    if type(module) is not nn.Identity or not args:
        return False
    return not isinstance(args[0], torch.Tensor) or bool(attributes_given_to(args[0]))


def _refuses_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether forward of a module has no parameters for these arguments, whatever their values are."""
    if module._forward_pre_hooks or has_own_call(type(module)):
        return False
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # forward is no Python function
        return False
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return True
    return False


def _check_gradient_hooks(module: nn.Module, path: str) -> None:
    if has_backward_hooks(module):
        name = f"'{path}'" if path else "the model"
        raise Untraceable(
            f"{name} has backward hooks, which the graph of what is inside would leave out,",
            advice="remove these hooks first; gradients of the graph come without them",
        )


def _check_packing(module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if type(module).forward is not nn.TransformerEncoder.forward or cast(Any, module.layers)[0].training:
        return
    mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    if mask is not None and getattr(module, "use_nested_tensor", False):
        name, attribute = (f"'{path}'", f"model.{path}") if path else ("the model", "model")
        raise Untraceable(
            f"{name} packs a padded batch into a nested tensor where gradients are off (use_nested_tensor), which no "
            "trace sees,",
            advice=f"make it with enable_nested_tensor=False, or set {attribute}.use_nested_tensor = False: only what "
            "it returns for padding is another value then",
        )
