"""Count, operator by operator, what the nodes of a graph compute, move and hold in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from featx.errors import CostError
from featx.ir.memory import memory_of
from featx.ir.overloads import Signature, tensors_among
from featx.passes.flops import FlopTable, Rule
from featx.passes.operators import OperatorMode
from featx.passes.traffic import bytes_moved


@dataclass
class Count:
    """What was counted while one node ran. `parameters` are those that it read, by memory."""

    flops: int = 0
    elementwise: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    allocated: int = 0
    peak: int = 0
    parameters: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    operators: dict[str, int] = field(default_factory=dict[str, int])
    unknown: dict[str, int] = field(default_factory=dict[str, int])


class OperatorCount(OperatorMode):
    """While it is entered, adds up in `now` what operators do; put a new `Count` there to begin anew.

    `alive` is the memory, in bytes, of all values that were made since it was entered and still are. About 15
    microseconds for each operator.

    Args:
        parameters: the parameters of the model.
        others: what else there was before: buffers and inputs.
        rules: FLOPs of operators, see `FlopTable`.
        on_unknown: called with the name of an operator for which there is no rule.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        others: Iterable[torch.Tensor],
        rules: Mapping[Any, Rule] | None,
        on_unknown: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.now = Count()
        self.alive = 0
        self._table = FlopTable(rules)
        self._on_unknown = on_unknown
        self._parameters = {memory_of(parameter): parameter for parameter in parameters}
        self._others = set(map(memory_of, others))
        # By memory: a reference that tells when it is freed.
        self._made: dict[int, weakref.ref[Any]] = {}

    def on_operator(self, func: Any, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and count it."""
        result = func(*args, **kwargs)
        now = self.now
        name = str(func) if signature is None else signature.name
        try:
            operations = self._table.count(func, args, kwargs, result)
        except Exception as error:  # not of the run: on other tensors it would be the same
            raise CostError(f"the FLOP rule for {name} raises {error!r}; correct it") from error
        if operations is None:
            now.unknown[name] = now.unknown.get(name, 0) + 1
            self._on_unknown(name)
        else:
            now.flops += operations.flops
            now.elementwise += operations.elementwise
        now.operators[name] = now.operators.get(name, 0) + 1
        is_view = signature is not None and signature.is_view
        if signature is not None and not is_view:
            read, written = bytes_moved(signature, args, kwargs, result)
            now.bytes_read += read
            now.bytes_written += written
        for tensor in (*tensors_among(args), *tensors_among(kwargs.values())):
            memory = memory_of(tensor)
            if memory in self._parameters:
                now.parameters[memory] = self._parameters[memory]
        if not is_view:
            for tensor in tensors_among((result,)):
                self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        memory = memory_of(tensor)
        if memory in self._made or memory in self._parameters or memory in self._others:
            return
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._made[memory] = weakref.ref(storage, partial(self._free, memory, size))
        self.alive += size
        self.now.allocated += size
        self.now.peak = max(self.now.peak, self.alive)

    def _free(self, memory: int, size: int, _: object) -> None:
        del self._made[memory]
        self.alive -= size
