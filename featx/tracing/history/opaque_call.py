"""What is observed while a call that becomes one node runs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from featx.tracing.environment.generators import SharedGenerators
from featx.tracing.source.frames import Line


class OpaqueCall:
    """What happens inside the call of a module, or a function, that is one node. There is one for each trace.

    Attributes:
        draws: whether it draws random numbers.
        writes_model: whether it writes a tensor of the model.
        has_untracked_writes: whether it may write memory without a new version of the tensor.
        ran: the modules whose forward ran.
        written_at: the lines that wrote something in place.
    """

    def __init__(self) -> None:
        # How many such calls the running code is inside.
        self._depth = 0
        self._generators: SharedGenerators | None = None
        self._forget()

    def _forget(self) -> None:
        self.draws = self.writes_model = self.has_untracked_writes = False
        self.ran: set[nn.Module] = set()
        self.written_at: set[Line | None] = set()

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

    def note_untracked_write(self) -> None:
        """Note a write that may not raise a version counter. Outside of an opaque call it is ignored."""
        self.has_untracked_writes = self.has_untracked_writes or self.is_inside

    def note_draw(self) -> None:
        """Note that it draws from a generator of Python or numpy, which is put back afterwards."""
        self.draws = True
        self._generators = self._generators or SharedGenerators()

    def restore_generators(self) -> None:
        """Put the generators of Python and numpy back from which it has drawn."""
        generators, self._generators = self._generators, None
        if generators is not None:
            generators.restore()
