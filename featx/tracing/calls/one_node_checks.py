"""Refuse calls of modules that must not be one node, because forward has changed the module or what is around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.overrides
from torch import nn
from torch.utils._device import DeviceContext

from featx.ir.modules import modules_of
from featx.ir.torch_layers import is_torch_layer
from featx.libraries import is_collecting_hook
from featx.tracing.calls.measured_calls import MeasuredCalls
from featx.tracing.guards.forms import attributes_given_to
from featx.tracing.objects.module_parts import has_forward_hooks
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.mode_reads import mode_of
from featx.tracing.replica.replica import Replica
from featx.tracing.side_effects.state_checks import StateChecks
from featx.tracing.signals import ModifiedFromOutside, RunsOnOtherParameters, Untraceable
from featx.tree import tree_leaves


class OneNodeChecks:
    """Refuses calls of modules that are not what the graph would call: the module of the model, as that was built.

    Args:
        recorder: knows the tensors of the model.
        measured: knows the attributes of tensors that calls have returned.
        checks: knows the modules as they were.
        replica: the modules.

    Attributes:
        modes_around: how many modes for functions of torch there are around forward.
    """

    def __init__(self, recorder: Recorder, measured: MeasuredCalls, checks: StateChecks, replica: Replica) -> None:
        self._recorder = recorder
        self._measured = measured
        self._checks = checks
        self._replica = replica
        self.modes_around = 0

    def check(self, module: nn.Module, path: str, values: Any, *, needs_measuring: bool) -> None:
        """Raise where forward has changed the module at `path`, or what is around its call.

        Args:
            module: the module.
            path: where it is.
            values: what it is called with.
            needs_measuring: whether what it does has to be observed. Not so for torch's layers without children.
        """
        self._check_as_built(module, path)
        self._check_modes(path, needs_measuring=needs_measuring)
        if needs_measuring:
            self._check_attributes(values, path)
            self._check_hooks(module, path)

    def _check_as_built(self, module: nn.Module, path: str) -> None:
        """Raise where forward has changed what the module is: the graph would call it as it is in the model."""
        if mode_of(module) is not self._checks.training[module]:
            raise Untraceable(f"forward switches '{path}' between train and eval mode")
        constants = self._recorder.earlier.constants
        for inner in modules_of(module):
            replaced = self._checks.states.replaced_part(inner)
            if replaced is not None:
                raise RunsOnOtherParameters(f"'{path}' runs with another '{replaced}' than its own")
            if has_forward_hooks(inner) and not self._has_hooks_of_model(inner):
                raise Untraceable(
                    f"forward registers a hook on '{path}' or inside it, which would not run in a trace,",
                    advice="run the model once before, if its first call alone does so; or register it in __init__",
                )
            for value in inner._parameters.values():
                if value is not None and id(value) not in self._recorder.owned and id(value) not in constants:
                    raise RunsOnOtherParameters(f"'{path}' runs with other parameters than its own")

    def _has_hooks_of_model(self, module: nn.Module) -> bool:
        original = self._replica.originals.get(module)
        if original is None or module._forward_pre_hooks.keys() != original._forward_pre_hooks.keys():
            return False
        hooks, before = module._forward_hooks, original._forward_hooks
        return before.keys() <= hooks.keys() and all(
            key in before or is_collecting_hook(hook) for key, hook in hooks.items()
        )

    def _check_modes(self, path: str, *, needs_measuring: bool) -> None:
        """Raise where forward has entered modes for functions of torch around a module that is kept whole.

        `with torch.device(...)` is one of them; layers of torch make no tensors.
        """
        if torch._C._len_torch_function_stack() <= self.modes_around:
            return
        all_modes: list[Any] = torch.overrides._get_current_function_mode_stack()
        modes = all_modes[self.modes_around :]
        if needs_measuring or any(not isinstance(mode, DeviceContext) for mode in modes):
            kind = type(modes[-1]).__name__
            raise ModifiedFromOutside(
                f"forward enters a TorchFunctionMode ({kind}) around '{path}', which is kept whole,"
            )

    def _check_hooks(self, module: nn.Module, path: str) -> None:
        """Raise where code inside may read what hooks inside store, and these do not run."""
        hooks = self._recorder.hooks
        if not hooks.are_run:
            hooks.check_read((inner for inner in modules_of(module) if not is_torch_layer(type(inner))), [path])

    def _check_attributes(self, values: Any, path: str) -> None:
        """Raise where forward has given a tensor an attribute that a module which is kept whole may read."""
        for tensor in tree_leaves(values):
            given = attributes_given_to(tensor) if isinstance(tensor, torch.Tensor) else {}
            name = next((name for name in given if not self._measured.has_given(tensor, name)), None)
            if name is not None:
                raise ModifiedFromOutside(
                    f"forward sets the attribute '{name}' of a tensor that '{path}' gets, which is kept whole,"
                )
