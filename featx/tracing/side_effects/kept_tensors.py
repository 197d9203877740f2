"""Tensors that a trace has made and that live on when it is over, in attributes, caches or elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from featx.ir.memory import memory_of
from featx.tracing.file_globals.caches import empty_functions_that_keep
from featx.tracing.history.earlier_calls import EarlierCalls
from featx.tracing.history.lineage import Origin
from featx.tracing.model_state.module_state import is_alias
from featx.tracing.recording.recorder import Recorder
from featx.tracing.replica.replica import tensors_held_by
from featx.tracing.side_effects.forward_side_effects import comes_from_inputs


class KeptTensors:
    """What the trace that `recorder` records has made. It is filled by `take`, when the trace is over."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # Stand-ins of the model's tensors, by id, with those tensors.
        self._stand_ins_of_model: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._followed: list[tuple[weakref.ref[torch.Tensor], Origin]] = []
        # The tensors of the calls that were compared with this one.
        self._twins: list[weakref.ref[torch.Tensor]] = []

    def take(self) -> None:
        """Note the tensors of the trace, without keeping them alive."""
        recorder = self._recorder
        are_shared = recorder.device.type == "meta"
        for tensor, _ in recorder.write_log.memories:
            origin = recorder.lineage.get(tensor)
            is_shared = id(tensor) in recorder.owned or (tensor.is_meta and are_shared)
            if origin is not None and not is_shared:
                self._followed.append((weakref.ref(tensor), origin))
        self._stand_ins_of_model = recorder.stand_ins.stand_ins_of_model()

    def add_twins(self, twins: list[weakref.ref[torch.Tensor]]) -> None:
        """Note the tensors of a second call too, or of a further one."""
        self._twins += twins

    def put_back(self, modules: Iterable[nn.Module]) -> None:
        """Let modules hold the tensors of before where forward has assigned what stands for them, or a name of that.

        `self.steps += 1` assigns a stand-in, and `self.table = self.table.to(x.device)` may assign an alias of one.
        """
        by_memory = {memory_of(stand_in): (stand_in, real) for stand_in, real in self._stand_ins_of_model.values()}
        for module in modules if by_memory else ():
            dicts: tuple[dict[str, Any], ...] = (
                cast("dict[str, Any]", module._parameters),
                module._buffers,
                module.__dict__,
            )
            for held in dicts:
                on_meta = [
                    (name, value) for name, value in held.items() if isinstance(value, torch.Tensor) and value.is_meta
                ]
                for name, value in on_meta:
                    known = by_memory.get(memory_of(value))
                    if known is not None and is_alias(value, known[0]):
                        held[name] = known[1]

    def alive(self, modules: Iterable[nn.Module]) -> EarlierCalls:
        """Return the tensors that live on, for the next call on the same modules."""
        earlier, owned = self._recorder.earlier, self._recorder.owned
        from_inputs, others = earlier.from_inputs.copy(), earlier.constants.copy()
        made = (tensor for module in modules for tensor in tensors_held_by(module))
        others.update((id(tensor), tensor) for tensor in made if id(tensor) not in owned)
        of_sizes = set(earlier.of_sizes)
        for reference, origin in self._followed:
            tensor = reference()
            if tensor is not None:
                (from_inputs if comes_from_inputs(origin) else others)[id(tensor)] = tensor
                if self._recorder.is_named(origin):
                    of_sizes.add(id(tensor))
        constants = {key: tensor for key, tensor in others.items() if key not in from_inputs}
        return EarlierCalls(from_inputs, constants, constants.keys() & of_sizes)

    def origins(self) -> dict[int, Origin]:
        """Return where the tensors that live on come from, by id."""
        alive = ((reference(), origin) for reference, origin in self._followed)
        return {id(tensor): origin for tensor, origin in alive if tensor is not None}

    def drop(self) -> list[weakref.ref[torch.Tensor]]:
        """Forget all tensors, and return them."""
        references = [*(each for each, _ in self._followed), *self._twins]
        self._stand_ins_of_model, self._followed, self._twins = {}, [], []
        return references


def drop_tensors(kept: Iterable[KeptTensors]) -> None:
    """Forget the tensors of several traces, and empty the cached functions of any file that keep one of them."""
    references = [reference for each in kept for reference in each.drop()]
    empty_functions_that_keep([alive for each in references if (alive := each()) is not None and alive.is_meta])
