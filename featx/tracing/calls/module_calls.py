"""Calls of modules: which a trace on an example looks into, and which are one node each."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from threading import get_ident
from typing import Any, cast

import torch
from torch import nn

from featx.errors import FeatxError
from featx.ir.module_effects import module_draws, module_writes_state
from featx.ir.modules import modules_of
from featx.ir.node import Node
from featx.ir.torch_layers import DROPOUTS, is_torch_layer
from featx.libraries import collecting_hooks, only_delegates_call
from featx.tracing.calls.checkpoint import Checkpoint
from featx.tracing.calls.measured_calls import MeasuredCalls
from featx.tracing.calls.one_node_checks import OneNodeChecks
from featx.tracing.calls.torch_calls import TorchCalls
from featx.tracing.guards.forms import attributes_given_to
from featx.tracing.guards.scalars import TracedNumber, plain_numbers
from featx.tracing.history.lineage import Part
from featx.tracing.model_state.left_attributes import LeftAttributes
from featx.tracing.model_state.module_state import parts_of, replaced_part
from featx.tracing.nodes.module_output import add_apart, mark_output
from featx.tracing.nodes.scope import Scope, requested_by
from featx.tracing.objects.module_parts import forward_of, has_forward_hooks
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.interception import has_backward_hooks, has_own_call
from featx.tracing.replica.mode_reads import mode_of
from featx.tracing.replica.replica import Replica
from featx.tracing.side_effects.state_checks import StateChecks
from featx.tracing.signals import (
    ModifiedFromOutside,
    NeedsRealValues,
    RunsOnOtherParameters,
    UnsupportedSideEffect,
    UnsupportedValue,
    Untraceable,
)
from featx.tracing.source.attributes import assigned_by, is_read
from featx.tracing.stand_ins.module_shapes import output_of
from featx.tree import tree_leaves

LeafPolicy = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Opening:
    """Which modules are looked into.

    Attributes:
        is_leaf: says, for a module of the model and its path, whether a call of it is one node.
        opened: the paths of the modules that are traced through, where that is known; `is_leaf` numbers nodes then.
        requested: the paths of modules whose outputs are marked.
        own_output: those whose output gets a node of its own: an edit replaces it, not the same tensor elsewhere.
        opaque_reasons: why modules are one node that `is_leaf` would look into, by path.
        opens_hooked: whether those that have forward hooks, or contain such, are looked into.
    """

    is_leaf: LeafPolicy
    opened: frozenset[str] | None
    requested: frozenset[str]
    own_output: frozenset[str]
    opaque_reasons: Mapping[str, str]
    opens_hooked: bool

    def must_open(self, path: str) -> bool:
        """Say whether a module may not be kept whole instead: the root, and those in which something is asked for."""
        return not path or (self.opened is not None and path in self.opened)


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
        ran_inside_opaque: paths of modules that were to be opened, or whose output was asked for, and that ran inside
            one that is kept whole.
        failed_module_path: the path of the innermost module in which the trace broke off, or "".
        one_node_checks: refuses calls that may not be one node.
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
        # Whether calls inside of modules that are kept whole count in the names of later calls of the same modules.
        self._counts_inside = opening.opened is not None
        self._caller = recorder.scope
        self._thread = get_ident()
        self._left = LeftAttributes(self._refuse_left)
        self.ran_inside_opaque: set[str] = set()
        self.failed_module_path = ""
        self.requested_calls: Counter[str] = Counter()
        self.one_node_checks = OneNodeChecks(recorder, measured, checks, replica)
        checks.states.note_opened(replica.root, _assigned_in_forward(replica.root))

    def on_call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of a module: one node, or whatever its forward does."""
        recorder = self._recorder
        if get_ident() != self._thread:
            if recorder.opaque_call.is_inside:
                recorder.opaque_call.note_untracked_write()  # perhaps: kernels of other threads are not observed
            else:
                self._torch_calls.refuse_other_threads()
            return forward(*args, **kwargs)
        if recorder.opaque_call.is_inside:
            self._note_call_inside(module)
            if recorder.hooks.are_run and has_forward_hooks(module):
                recorder.opaque_call.ran.add(module)
                return forward(*args, **kwargs)
            result = self._result_of(module, args, kwargs)
            for collect in collecting_hooks(module):
                collect(module, args, result)
            return result
        recorder.raised.check()
        self._torch_calls.check_unrecorded()
        self._torch_calls.check_switches()
        frame = recorder.model_frame()
        if frame is not None:
            recorder.note_code(frame, "a module is called")
            if frame.f_code.co_exceptiontable and _refuses_arguments(module, args, kwargs):
                return forward(*args, **kwargs)  # raises a TypeError, which `except TypeError` may wait for
        path = recorder.path_of_module(module)
        outer = recorder.scope
        for requested in requested_by(path, self._opening.requested, outer.stack):
            self.requested_calls[requested] += 1
        recorder.scope = Scope(path, type(module), outer.stack)
        self._caller = outer
        try:
            is_leaf = self._is_leaf(module, path)
            if self._is_one_node(module, path, is_leaf) and not _returns_given_object(module, args):
                try:
                    _, result = self._call_opaque(module, path, args, kwargs, is_leaf=is_leaf)
                    return result
                except (
                    UnsupportedValue,
                    ModifiedFromOutside,
                ):  # a cache that forward has made, `block.height = height`
                    if self._opening.opened is None or is_leaf:
                        raise
                except RunsOnOtherParameters:
                    pass  # its forward reads them
                recorder.raised.forget()
            return self._open(module, path, forward, args, kwargs)
        except BaseException as error:
            self.failed_module_path = self.failed_module_path or path
            if isinstance(error, Exception):
                recorder.raised.note_failure(error)
            raise
        finally:
            recorder.scope = outer

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

    def _note_call_inside(self, module: nn.Module) -> None:
        path = self._replica.paths.get(module)
        if path is None:
            return
        opened = self._opening.opened
        if path in self._opening.requested or (opened is not None and path in opened):
            self.ran_inside_opaque.add(path)
        if self._counts_inside and self._is_leaf(module, path):
            self._recorder.names.skip(path)

    # -- modules that are looked into --------------------------------------------------------------------------------

    def check_root(self, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, needs_output: bool) -> None:
        """Raise Untraceable where a graph of what is inside of the root would not do what a call of it does."""
        if isinstance(root, nn.Module):
            if needs_output:
                _check_gradient_hooks(root, "")
            _check_packing(root, "", args, kwargs)

    def _open(
        self, module: nn.Module, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recorder = self._recorder
        self._left.reveal(module)
        self._measured.context.check_plain_values()  # those that the code around the call has changed
        caller, attempt = self._caller, Checkpoint(recorder, self._checks, self._torch_calls)
        changed, parts = self._checks.states.changed_by_others(module), parts_of(module)
        changed_outside = self._measured.changed_for_call() if self._may_stay_opaque(module) else None
        if changed is not None or changed_outside is not None:
            self._checks.note_changed_outside(path)
        try:
            if path in self._opening.opaque_reasons:
                raise Untraceable(self._opening.opaque_reasons[path])
            _check_gradient_hooks(module, path)
            self._take_parts((args, kwargs), caller)
            _check_packing(module, path, args, kwargs)
            self._checks.states.note_opened(module, _assigned_in_forward(module))
            with self._checks.in_progress(module):
                result = forward(*args, **kwargs)
            recorder.raised.check()
            if not isinstance(result, (tuple, list, dict)):
                self._take_parts(result, attempt.scope)
            replaced = replaced_part(module, parts)
            if replaced is not None:
                raise UnsupportedSideEffect(f"forward replaces '{replaced}' of '{path}', and a graph does not,")
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
            if changed is not None or changed_outside is not None:  # a graph that calls it does not change that
                what = f"{changed_outside} for" if changed is None else f"the attribute '{changed}' of or inside"
                raise ModifiedFromOutside(
                    f"forward changes {what} '{path}', which is kept whole ({error.what.rstrip(' ,')}),"
                ) from error
            # The nodes that were recorded inside are erased, and the module becomes one node.
            recorder.raised.forget()
            attempt.roll_back(module)
            self._measured.accept_outer_values()
            self._caller, self._torch_calls.unrecorded, self.failed_module_path = caller, None, ""
            return self._keep_whole(module, path, args, kwargs, error.what)

    def _keep_whole(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """Record the call of a module as one node although it was to be looked into; return what it returns."""
        counts_inside, self._counts_inside = self._counts_inside, True
        try:
            node, result = self._call_opaque(module, path, args, kwargs, is_leaf=self._is_leaf(module, path))
        finally:
            self._counts_inside = counts_inside
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

    # -- modules that are one node -----------------------------------------------------------------------------------

    def _call_opaque(
        self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_leaf: bool
    ) -> tuple[Node, Any]:
        """Record the call of a module as one node; return the node and what the module returns."""
        recorder = self._recorder
        # The caller takes out of a value what it passes on.
        with recorder.in_scope(self._caller), torch._C.DisableTorchFunction():
            arguments, keywords = recorder.create_args(args), recorder.create_kwargs(kwargs)
        # What torch's own leaves do is known.
        needs_measuring = not is_torch_layer(type(module)) or bool(module._modules)
        self.one_node_checks.check(module, path, (args, kwargs), needs_measuring=needs_measuring)
        self._left.reveal(module)
        self._checks.check_untouched(module, path)
        if needs_measuring:
            self._checks.check_references(module, path)
            self._checks.check_no_shared_plain_values(module, path)
        shown_args, shown_kwargs = (args, kwargs) if recorder.numbers.earlier is None else plain_numbers((args, kwargs))
        node, result = self._measured.run(
            ("call_module", path, arguments, keywords),
            shown_args,
            shown_kwargs,
            functools.partial(
                self._result_for_all if needs_measuring else self._result_of, module, shown_args, shown_kwargs
            ),
            is_measured=needs_measuring,
            module=module,
            is_opaque_module=not is_leaf,
            taken_in=self._caller,
        )
        changed = self._checks.states.changed_by_call(module) if needs_measuring else ()
        assigned = {
            inner: names | _assigned_in_forward(inner)
            for inner, names in changed
            if not isinstance(inner, torch.jit.ScriptModule)
        }
        self._checks.note_opaque_call(module, path, needs_measuring=needs_measuring)
        for inner, names in assigned.items():
            self._hide(inner, names)
        if any(assigned.values()):
            self._measured.note_left_attributes(node)
        recorder.note_call(path, args, kwargs, result)
        if args and _may_return_input_in_eval_mode(module, args[0], result):
            recorder.note_alias(result, args[0], None)
        for collect in collecting_hooks(module):
            collect(module, args, result)
        if path in self._opening.own_output and any(map(_may_keep, (*args, *kwargs.values()))):
            return node, self._measured.apart(result, add_apart(recorder.graph, node))
        return node, result

    def _hide(self, module: nn.Module, assigned: set[str]) -> None:
        """Notice reads of the attributes that a call of a module has changed, or may have set to what they were."""
        for name in self._left.hide(module, assigned):
            if any(is_read(type(each), name) for each in self._checks.opened_modules):
                self._refuse_left(module, name)

    def _refuse_left(self, module: nn.Module, name: str) -> None:
        if self._recorder.opaque_call.is_inside:  # what a module that is kept whole reads there, it will find there
            return
        path = self._replica.paths.get(module, type(module).__name__)
        raise Untraceable(f"forward reads the attribute '{name}' of '{path}', which is kept whole and has assigned it,")

    def end(self) -> None:
        """Put back the attributes whose reads were noticed."""
        self._left.reveal()

    def _result_for_all(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call, if all that it leaves is its own.

        Raises:
            UnsupportedValue: it has put a plain value, such as a size, where other modules may read it. A graph would
                have that as a constant. What it has put there is taken away.
        """
        states = self._checks.states
        mark = states.mark()
        result = self._result_of(module, args, kwargs)
        noted = states.noted_for_others(module, _assigned_in_forward)
        if noted is not None:
            states.reset(module, mark)
            raise UnsupportedValue(
                f"'{self._replica.paths[module]}' is kept whole and puts a number or text into '{noted}', which other "
                "modules have too,"
            )
        return result

    def _result_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Without its hooks: they are to run when the extractor does, and not before.
        recorder, opaque_call = self._recorder, self._recorder.opaque_call
        opaque_call.ran.add(module)
        if not recorder.is_real:
            with torch._C.DisableTorchFunction():
                # Layers of torch with weights, whose values are not known, write no input.
                if (module._parameters or module._buffers) and is_torch_layer(type(module)):
                    of = recorder.stand_ins.of
                    args = tuple([of(each) if type(each) is torch.Tensor else each for each in args])
                result = output_of(module, args, kwargs)
            if recorder.device.type != "meta" and _runs_on_tensors_of_its_own(module):
                raise NeedsRealValues
            if result is not None:
                if mode_of(module):
                    opaque_call.draws = opaque_call.draws or module_draws(module)
                    opaque_call.writes_model = opaque_call.writes_model or module_writes_state(module)
                return result
        return module.forward(*args, **kwargs)


def _assigned_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the attributes that forward of a module may assign or change, as far as its source tells."""
    return assigned_by(forward_of(module), type(module)) or frozenset()


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


def _may_keep(value: Any) -> bool:
    """Say whether a module may put what it returns into an argument, where others find it."""
    return not isinstance(value, (torch.Tensor, bool, int, float, complex, str, type(None)))


def _runs_on_tensors_of_its_own(module: nn.Module) -> bool:
    # Scripted code runs on tensors that no stand-in takes the place of, and may write them.
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return is_scripted and next(chain(module.parameters(), module.buffers()), None) is not None


def _may_return_input_in_eval_mode(module: nn.Module, value: Any, result: Any) -> bool:
    """Say whether a module that was called on `value` returns that in eval mode, or with a dropout rate of 0."""
    if not isinstance(result, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if isinstance(module, DROPOUTS):
        return True
    with torch._C.DisableTorchFunction():
        if not module._modules or result.shape != value.shape or result.dtype != value.dtype:
            return False
    return any(isinstance(inner, DROPOUTS) for inner in modules_of(module))


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
