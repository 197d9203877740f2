"""Put back what a run changes of tensors that it has not made: in globals, in lists of a module, in closures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from featx.ir.memory import memory_of
from featx.tracing.side_effects.recent_writes import RecentWrites, whole_memory
from featx.tree import tensors_in


class _Form(NamedTuple):
    """What a tensor has that may be assigned: its memory, as an alias of it, and what belongs to its gradient."""

    alias: torch.Tensor
    requires_grad: bool
    grad: torch.Tensor | None


class ForeignTensors:
    """The tensors that a run writes or changes, and that neither it nor an earlier call of its replica has made.

    Args:
        own: tensors that the run may change: those of its replica.
        earlier: the same of an earlier call of the replica.
        are_shared: whether its own tensors are those of the model, of which it may write stand-ins alone.

    Attributes:
        recent: saves what a part of the run writes, of any tensors.
    """

    def __init__(
        self, own: Iterable[torch.Tensor], earlier: ForeignTensors | None = None, *, are_shared: bool = False
    ) -> None:
        self.recent = RecentWrites()
        self._are_shared = are_shared
        # By their memory. What the run may change joins when it is first asked for, which is not in most runs.
        self._made: set[int] = set() if earlier is None else earlier._made
        self._own: Iterable[torch.Tensor] = own
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._forms: dict[int, tuple[torch.Tensor, _Form]] = {}

    def note_made(self, value: Any, given: Any = ()) -> None:
        """Take note of what a call has made, other than views of what it was given, or of copies for the run."""
        if isinstance(value, torch.Tensor) and value.is_meta:
            return
        made = set(map(memory_of, _tensors(value)))
        if made and (self.recent.are_saved or not made <= self._made):
            made.difference_update(map(memory_of, _tensors(given)))
            self._made |= made
            self.recent.note_made(made)

    def save(self, written: Iterable[Any]) -> None:
        """Copy the memory of tensors that are about to be written, once each."""
        for tensor in written:
            if isinstance(tensor, torch.Tensor) and self._is_foreign(tensor):
                memory = memory_of(tensor)
                if memory not in self._values:
                    with torch.inference_mode(False):  # what is made in that mode could not be written after it
                        whole = whole_memory(tensor)
                        self._values[memory] = whole, whole.clone()

    def save_form(self, tensor: torch.Tensor) -> None:
        """Keep what may be assigned of a tensor, or may be written by other means than a torch call, once."""
        if is_functorch_wrapped_tensor(tensor):  # it is of a call of torch.func, after which it cannot be assigned
            return
        if id(tensor) not in self._forms and not tensor.is_meta and (self._are_shared or self._is_foreign(tensor)):
            self.save((tensor,))
            form = _Form(tensor.detach(), tensor.requires_grad, tensor.grad if tensor.is_leaf else None)
            self._forms[id(tensor)] = tensor, form

    def restore(self) -> None:
        """Put back what is another one now. May be called twice."""
        with torch.no_grad():
            for whole, saved in self._values.values():
                if not torch.equal(whole, saved):
                    whole.copy_(saved)
            for tensor, form in self._forms.values():
                if memory_of(tensor) != memory_of(form.alias):
                    tensor.data = form.alias
                if tensor.requires_grad is not form.requires_grad:
                    tensor.requires_grad_(form.requires_grad)
                if tensor.is_leaf and tensor.grad is not form.grad:
                    tensor.grad = form.grad

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta or tensor.layout is not torch.strided:
            return False
        self._made.update(map(memory_of, self._own))
        self._own = ()
        memory = memory_of(tensor)  # of a tensor of torch.func its id: it has none
        return memory != id(tensor) and memory not in self._made


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tensors_in(value) if not leaf.is_meta]
