"""The random generators of Python and numpy that everybody shares: their state, taken and put back."""

from __future__ import annotations

import random
import sys
from typing import Any


class SharedGenerators:
    """The state of Python's and, where it is loaded, numpy's global generator when this is made. About 10 us."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def have_drawn(self) -> bool:
        """Say whether somebody has drawn from one of them since."""
        if random.getstate() != self._python:
            return True
        # Not where numpy was loaded since.
        return self._numpy is not None and _comparable(_numpy_state()) != _comparable(self._numpy)

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy.random")
    return None if numpy is None else numpy.get_state()


def _comparable(state: Any) -> Any:
    return (state[0], state[1].tobytes(), *state[2:])
