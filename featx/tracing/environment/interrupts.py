"""After an interrupt or an error: find an interrupt that another error has replaced, and free what frames hold."""

from __future__ import annotations

import sys
import traceback


class Interrupts:
    """Looks for a KeyboardInterrupt behind other errors, of those that come after this is made.

    An interrupt leaves `with torch.no_grad():` of the model through an `__exit__`, whose calls the trace records. The
    trace may raise there, because a call is not the one that it expects, and its error takes the interrupt's place.
    """

    def __init__(self) -> None:
        self._handled = sys.exc_info()[1]

    def raise_behind(self, error: BaseException) -> None:
        """Raise the interrupt during which `error` was raised, if there was one. O(errors in the chain)."""
        before: BaseException | None = error
        while before is not None and before is not self._handled:
            if isinstance(before, KeyboardInterrupt):
                raise before
            before = before.__context__


def free_frames(error: BaseException) -> None:
    """Free what the frames hold that an error or an interrupt has left: tensors of a trace, and contexts.

    A context manager of torch that was left in its `__exit__` pushes the mode of the trace again when its frame goes.
    """
    left: BaseException | None = error
    while left is not None:
        traceback.clear_frames(left.__traceback__)
        left = left.__context__
