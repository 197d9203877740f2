"""What becomes of errors in a run: interrupts that others replace, and errors that the model catches."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from featx.tracing.signals import Signal, Untraceable, note_signals


class RaisedErrors:
    """Finds out what the model does with the errors that featx and torch raise in it.

    - An interrupt leaves `with torch.no_grad():` of the model through an `__exit__`, whose calls the trace records.
      The trace may raise there, because a call is not the one that it expects, and its error takes the interrupt's
      place.
    - A bare `except:` of the model, or a `return` in a `finally`, catches the signals of the trace.
    - Code that catches the error of a call, wherever it does so, goes another way than for inputs without that error.
    """

    def __init__(self) -> None:
        # What the caller of the trace handles is no business of this run.
        self._outer = sys.exc_info()[1]
        self._signal: Signal | None = None
        self._failure: Exception | None = None

    @contextmanager
    def in_run(self) -> Generator[None]:
        """Know the signals that are raised in the `with` block, by this thread.

        Raises:
            KeyboardInterrupt: one has come, and another error has replaced it.
            Signal: the model has caught it, or another error has replaced it.
            Untraceable: the model has caught the error of a call.
        """
        self.forget()
        try:
            with note_signals(self.note_signal):
                yield
        except BaseException as error:
            self.raise_behind(error)
            if self._signal is not None and isinstance(error, Exception):
                raise self._signal from error
            raise
        else:
            self.check()
        finally:
            self.forget()

    def note_signal(self, signal: Signal) -> None:
        """Take note of a signal that is about to be raised. `forget` it where featx catches it itself."""
        self._signal = signal

    def note_failure(self, error: Exception) -> None:
        """Take note of an error with which a call of the model ends."""
        self._failure = error

    def forget(self) -> None:
        """Take note that featx has caught what was raised last."""
        self._signal = self._failure = None

    def check(self) -> None:
        """Raise what the model has caught. Costs two comparisons where nothing was raised.

        Nothing is raised while an error is handled: it may go on, as after `finally`.
        """
        if self._signal is not None and not self._is_handled(self._signal):
            raise self._signal
        if self._failure is not None and not self._is_handled(self._failure):
            failure, self._failure = self._failure, None
            raise Untraceable(
                f"forward catches the error of a call ({type(failure).__name__}: {first_line(failure)}), and other "
                "inputs may not cause it,"
            )

    def raise_behind(self, error: BaseException) -> None:
        """Raise the interrupt during which `error` was raised, if there was one. O(errors in the chain)."""
        for before in self._chain(error):
            if isinstance(before, KeyboardInterrupt):
                raise before

    def _is_handled(self, error: BaseException) -> bool:
        return any(each is error for each in self._chain(sys.exc_info()[1]))

    def _chain(self, error: BaseException | None) -> Iterator[BaseException]:
        while error is not None and error is not self._outer:
            yield error
            error = error.__context__


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, 100 characters at most."""
    line = next(iter(str(error).splitlines()), "")
    return line if len(line) <= 100 else line[:97] + "..."


def free_frames(error: BaseException) -> None:
    """Free what the frames hold that an error or an interrupt has left: tensors of a trace, and contexts."""
    left: BaseException | None = error
    while left is not None:
        traceback.clear_frames(left.__traceback__)
        left = left.__context__
