"""Calls of modules that are kept whole: each is one node of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from featx.ir.module_effects import module_draws, module_writes_state
from featx.ir.modules import modules_of
from featx.ir.node import Node
from featx.ir.torch_layers import DROPOUTS, is_torch_layer
from featx.libraries import collecting_hooks
from featx.tracing.calls.measured_calls import MeasuredCalls
from featx.tracing.calls.one_node_checks import OneNodeChecks
from featx.tracing.calls.opening import Opening
from featx.tracing.guards.scalars import plain_numbers
from featx.tracing.model_state.left_attributes import LeftAttributes
from featx.tracing.nodes.module_output import add_apart
from featx.tracing.nodes.scope import Scope
from featx.tracing.objects.module_parts import forward_of, has_forward_hooks
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.mode_reads import mode_of
from featx.tracing.replica.replica import Replica
from featx.tracing.side_effects.state_checks import StateChecks
from featx.tracing.signals import NeedsRealValues, UnsupportedValue, Untraceable
from featx.tracing.source.attributes import assigned_by, is_read
from featx.tracing.stand_ins.module_shapes import output_of


class WholeModules:
    """Runs modules that are kept whole, and records each call of one as a node.

    Args:
        recorder: makes the nodes.
        measured: runs the calls.
        checks: compares modules with what they were.
        replica: the modules.
        opening: which modules are looked into.

    Attributes:
        checks_before: refuses calls that may not be one node.
        counts_inside: whether calls inside of such modules count in the names of later calls of the same modules.
        ran_inside: paths of modules that were to be opened, or whose output was asked for, and that ran inside one.
    """

    def __init__(
        self, recorder: Recorder, measured: MeasuredCalls, checks: StateChecks, replica: Replica, opening: Opening
    ) -> None:
        self._recorder = recorder
        self._measured = measured
        self._checks = checks
        self._replica = replica
        self._opening = opening
        self._left = LeftAttributes(self._refuse_left)
        self.checks_before = OneNodeChecks(recorder, measured, checks, replica)
        self.counts_inside = opening.opened is not None
        self.ran_inside: set[str] = set()

    def call(
        self,
        module: nn.Module,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        caller: Scope,
        *,
        is_leaf: bool,
    ) -> tuple[Node, Any]:
        """Record the call of a module at `path` as one node; return the node and what the module returns.

        `caller` is the scope of the code that calls it, and `is_leaf` what the leaf policy says of it.
        """
        recorder = self._recorder
        # The caller takes out of a value what it passes on.
        with recorder.in_scope(caller), torch._C.DisableTorchFunction():
            arguments, keywords = recorder.create_args(args), recorder.create_kwargs(kwargs)
        # What torch's own leaves do is known.
        needs_measuring = not is_torch_layer(type(module)) or bool(module._modules)
        self.checks_before.check(module, path, (args, kwargs), needs_measuring=needs_measuring)
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
            taken_in=caller,
        )
        recorder.hooks.check_result(module, result)
        changed = self._checks.states.changed_by_call(module) if needs_measuring else ()
        assigned = {
            inner: names | assigned_in_forward(inner)
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

    def call_inside(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module that one which is kept whole calls, and return what it returns. It becomes no node."""
        recorder = self._recorder
        self._note_call_inside(module)
        if recorder.hooks.are_run and has_forward_hooks(module):
            recorder.opaque_call.note_run(module, args, kwargs)
            return forward(*args, **kwargs)
        result = self._result_of(module, args, kwargs)
        for collect in collecting_hooks(module):
            collect(module, args, result)
        return result

    def _note_call_inside(self, module: nn.Module) -> None:
        path = self._replica.paths.get(module)
        if path is None:
            return
        opened = self._opening.opened
        if path in self._opening.requested or (opened is not None and path in opened):
            self.ran_inside.add(path)
        if self.counts_inside and self._opening.is_leaf(self._replica.originals.get(module, module), path):
            self._recorder.names.skip(path)

    def reveal(self, module: nn.Module | None = None) -> None:
        """Put back the attributes of a module and of those inside it whose reads are noticed, or all."""
        self._left.reveal(module)

    def _result_for_all(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call, if all that it leaves is its own.

        Raises:
            UnsupportedValue: it has put a plain value, such as a size, where other modules may read it. A graph would
                have that as a constant. What it has put there is taken away.
        """
        states = self._checks.states
        mark = states.mark()
        result = self._result_of(module, args, kwargs)
        noted = states.noted_for_others(module, assigned_in_forward)
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
        opaque_call.note_run(module, args, kwargs)
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


def assigned_in_forward(module: nn.Module) -> frozenset[str]:
    """Return the attributes that forward of a module may assign or change, as far as its source tells."""
    return assigned_by(forward_of(module), type(module)) or frozenset()


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
