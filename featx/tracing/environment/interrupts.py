"""Find an interrupt that another error has replaced."""

from __future__ import annotations

import sys


class Interrupts:
    """Looks for a KeyboardInterrupt behind other errors, of those that come after this is made.

    An interrupt leaves `with torch.no_grad():` of the model through an `__exit__`, whose calls the trace hears. The
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
