"""The inputs of one run: what stands for the tensors of the example, and what forward may notice of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

import torch

from featx.ir.graph import Graph
from featx.tracing.guards.guards import aliases_of, require_aliases
from featx.tracing.inputs.example_inputs import bind_example
from featx.tracing.inputs.tensor_kinds import TensorKinds
from featx.tracing.recording.recorder import Recorder
from featx.tracing.recording.results import ContentsSnapshot, Results
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.signals import NeedsRealValues, NeedsSharedInputs
from featx.tracing.source_uses.code_queries import compares_objects
from featx.tracing.stand_ins.stand_ins import copy_of_input


class RunInputs:
    """The inputs of one run.

    Attributes:
        share_stand_ins: whether one tensor that is two inputs gets one stand-in. Otherwise each input gets its own.
        are_compared: whether forward may notice that one tensor is two inputs: it uses `is`, or writes an input.
        contents: what the containers and objects among the inputs held at the start.
        kinds: what forward may notice of the classes and attributes of its tensors.
    """

    def __init__(
        self,
        recorder: Recorder,
        results: Results,
        model_context: ModelContext,
    ) -> None:
        self.share_stand_ins = False
        self.are_compared = False
        self.contents: list[ContentsSnapshot] = []
        self.kinds = TensorKinds()
        self._recorder = recorder
        self._results = results
        self._context = model_context
        # By the id of the tensor of the example that they stand for.
        self._stand_ins: dict[int, torch.Tensor] = {}

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the placeholders of the graph, and return what to call forward with."""
        call_args, call_kwargs, self.contents = bind_example(
            self._recorder, self._results, self._context, args, kwargs, self._stand_in
        )
        self._recorder.given = {id(each.container): each.before for each in self.contents}
        return call_args, call_kwargs

    def require_aliases(
        self, graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any], codes: Iterable[CodeType]
    ) -> None:
        """Add a check to the graph that inputs are one tensor as on the example, if forward may notice that.

        Args:
            graph: the graph of the run.
            args: the example.
            kwargs: the example.
            codes: the code that ran.

        Raises:
            NeedsSharedInputs: one tensor is two inputs, and each had a stand-in of its own.
        """
        is_written = self._recorder.write_log.has_written_inputs()
        if not self.are_compared:
            self.are_compared = is_written or any(map(compares_objects, codes))
        if not self.are_compared:
            return
        bound = self._context.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        aliases = aliases_of(tuple(bound.arguments.values()))
        are_shared = len(set(aliases)) < len(aliases)
        if are_shared and not self.share_stand_ins:
            raise NeedsSharedInputs
        require_aliases(graph, aliases if are_shared else None, is_written=is_written)

    def release(self) -> None:
        """Drop all values."""
        self.contents = []
        self._stand_ins = {}
        self._recorder.given = {}

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kinds.note_input(tensor)
        known = self._stand_ins.get(id(tensor)) if self.share_stand_ins else None
        found = self._stand_ins[id(tensor)] = self._copy(tensor) if known is None else known
        if self._recorder.call_record is not None:
            self._recorder.call_record.note_input(found)
        return found

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        is_real = self._recorder.is_real
        if tensor.layout is not torch.strided:
            if not is_real:
                raise NeedsRealValues  # what a sparse tensor computes depends on which of its values are there
            return tensor.detach().clone()
        if is_real or tensor.is_meta:
            return copy_of_input(tensor)
        return self._recorder.stand_ins.of_input(tensor)
