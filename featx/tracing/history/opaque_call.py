"""What is observed while a call that becomes one node runs."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from featx.tracing.environment.generators import SharedGenerators
from featx.tree import tensors_in

# What nothing can write in place.
_PLAIN = frozenset({type(None), bool, int, float, str})


class OpaqueCall:
    """What happens inside the call of a module, or a function, that is one node. There is one for each trace.

    Attributes:
        draws: whether it draws random numbers.
        has_drawn_from_python: whether such a call of this run has drawn from a generator of Python or numpy.
        writes_model: whether it writes a tensor of the model.
        written: the memory of the tensors of the model that were seen to be written.
        has_untracked_writes: whether it may write memory without a new version of the tensor.
        asks_for_values: whether Python code inside may decide by values of tensors, or by random numbers of Python.
        asks_for_sizes: whether Python code inside asks a tensor for something else than a tensor.
        ran: the modules whose forward ran, each with the places and names of arguments that were no plain values.
    """

    def __init__(self) -> None:
        # How many such calls the running code is inside.
        self._depth = 0
        self._generators: SharedGenerators | None = None
        self.has_drawn_from_python = False
        # What kernels have computed inside of such calls from tensors of the graph, in a run for real, by id: a hook
        # may hand it out past the result. In other runs it is a stand-in that no recorded call returned.
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._forget()

    def _forget(self) -> None:
        self.draws = self.writes_model = self.has_untracked_writes = False
        self.asks_for_values = self.asks_for_sizes = False
        self.ran: dict[nn.Module, set[int | str]] = {}
        self.written: set[int] = set()

    def note_run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note that the forward of a module inside runs, and which of its arguments are no plain values."""
        given = self.ran.setdefault(module, set())
        given.update(place for place, value in enumerate(args) if type(value) not in _PLAIN)
        given.update(name for name, value in kwargs.items() if type(value) not in _PLAIN)

    @property
    def is_inside(self) -> bool:
        """Whether the running code is inside such a call."""
        return self._depth > 0

    def __enter__(self) -> None:
        self._forget()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1

    @contextmanager
    def unrecorded(self) -> Generator[None]:
        """Let what runs in the `with` block count as inside of such a call; what it does is not observed."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def leave(self) -> None:
        """Take note that the running code is outside of such calls: an error has ended them."""
        self._depth = 0

    def note_made(self, result: Any) -> None:
        """Note what a kernel inside has computed from tensors of the graph, or from what `has_made` knows."""
        self._made.update((id(tensor), weakref.ref(tensor)) for tensor in tensors_in(result))

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Say whether a kernel inside of a call that is one node, this one or an earlier one, has computed a tensor."""
        reference = self._made.get(id(tensor))
        return reference is not None and reference() is tensor

    def note_model_write(self, memories: Iterable[int]) -> None:
        """Note a write into tensors of the model, which have this memory."""
        self.writes_model = True
        self.written.update(memories)

    def note_untracked_write(self) -> None:
        """Note a write that may not raise a version counter. Outside of an opaque call it is ignored."""
        self.has_untracked_writes = self.has_untracked_writes or self.is_inside

    def note_answer(self, answer: Any, *, is_value: bool) -> None:
        """Note what a call of torch inside has returned to Python; `is_value` says that it is computed from values."""
        if is_value:
            self.asks_for_values = True
        elif not self.asks_for_sizes and not _is_made_of_tensors(answer):
            self.asks_for_sizes = True

    def note_draw(self) -> None:
        """Note that it draws from a generator of Python or numpy, which is put back afterwards."""
        self.draws = self.asks_for_values = self.has_drawn_from_python = True
        self._generators = self._generators or SharedGenerators()

    def restore_generators(self) -> None:
        """Put the generators of Python and numpy back from which it has drawn."""
        generators, self._generators = self._generators, None
        if generators is not None:
            generators.restore()


def _is_made_of_tensors(answer: Any) -> bool:
    if isinstance(answer, (tuple, list)):
        return all(map(_is_made_of_tensors, answer)) and not isinstance(answer, torch.Size)
    return answer is None or isinstance(answer, torch.Tensor)
