"""CountedSize: a size of a tensor of which code asks the product, which `torch.Size` computes in C."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch

from featx.ir.node import Node
from featx.tracing.guards.scalars import plain_number
from featx.tracing.history.lineage import Origin
from featx.tracing.recording.recorder import Recorder


class CountedSize(tuple[Any, ...]):
    """Stands in for a `torch.Size` where the source shows that its `numel`, or that of a slice, is called at once."""

    _recorder: Recorder
    _origin: Origin

    @classmethod
    def of(cls, lengths: Iterable[Any], origin: Origin, recorder: Recorder) -> CountedSize:
        """Return one of traced lengths, the value of `origin`."""
        made = cls(lengths)
        made._recorder, made._origin = recorder, origin
        return made

    def __getitem__(self, key: Any) -> Any:
        taken = super().__getitem__(key)
        if not isinstance(key, slice):
            return taken
        origin = self._add("call_function", operator.getitem, key)
        return torch.Size(taken) if origin is None else self.of(taken, origin, self._recorder)

    def numel(self) -> Any:
        """Return the product of the lengths, the value of a node."""
        count, numbers = math.prod(map(plain_number, self)), self._recorder.numbers
        node = self._add("call_method", "numel")
        if node is None:
            return count
        numbers.sizes_were_read = True
        return numbers.new(count, node)

    def _add(self, op: str, target: Any, *args: Any) -> Node | None:
        """Add a node of a call; None where the trace is over, whose values its second call gets."""
        if not self._recorder.numbers.is_recording():
            return None
        return self._recorder.add_node(op, target, (self._recorder.node_of(self._origin), *args), {}, None, None)
