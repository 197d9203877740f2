"""Signals that end a run of the example tracer or restart it. `except Exception` in a model does not catch them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from featx.errors import TraceError
from featx.libraries import advice_for
from featx.tracing.source.frames import describe, line_of, user_frame

# What to do where code cannot be followed.
KEEP_WHOLE_ADVICE = (
    "put the code that does it into a submodule, which is kept whole, or into a function that featx.wrap marks"
)
REQUEST_EARLIER_ADVICE = "or request values that forward has computed before, by their names: no more is followed"


class _Run(threading.local):
    """What wants to know of the signals that are raised in this thread."""

    note: Callable[[Signal], None] | None = None


_RUN = _Run()


class Signal(BaseException):
    """Ends a run, or starts it again.

    A bare `except:` of the model catches it all the same, so the run takes note of each when it is made.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if _RUN.note is not None:
            _RUN.note(self)


@contextmanager
def note_signals(note: Callable[[Signal], None]) -> Generator[None]:
    """Call `note` with each signal that this thread makes in the `with` block."""
    outer, _RUN.note = _RUN.note, note
    try:
        yield
    finally:
        _RUN.note = outer


class Untraceable(Signal):
    """An opened module does something that a graph cannot express.

    `value` is the object that it is about, if there is one; `advice` says what to do.
    """

    def __init__(self, what: str, value: object = None, *, advice: str = "") -> None:
        super().__init__(what)
        frame = user_frame()
        self.advice = advice or advice_for(value)
        self.what, self.line, self.place = what, line_of(frame), describe(frame)


class NeedsRealValues(Signal):
    """The model reads a tensor value, and the tensors of this run have no values."""


class AllNeededRecorded(Signal):
    """A repeated run has recorded all nodes that the requested values need."""


class UnsupportedValue(Untraceable):
    """A value that no graph can hold is passed to a call that is one node."""


class Diverged(Signal):
    """A run does something else than the one that it is compared with."""


class Restart(Signal):
    """The run has to start again with another setup; see `RunSetup`."""


class ReadOrderUnknown(Restart):
    """Forward assigns an input-dependent value to an attribute and reads it; the order of the two is not known."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(name)
        self.attribute = (path, name)


class NeedsConversionTracking(Restart):
    """Code converts a traced number in a file whose names `int`, `float` and `len` are not replaced yet."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__()
        self.namespace = namespace


class NeedsPlainValueChecks(Restart):
    """Forward changes a number or text of its Python file, and it is not known which module does it."""


class NeedsDrawsPutBack(Restart):
    """Something has drawn from Python's generator, perhaps a library that checks types."""


class NeedsFixedKeys(Restart):
    """A dict that a size was looked up in as a text has other keys too: what is found there depends on the size."""


class ChangesOuterValues(Restart):
    """Forward sets something outside of its modules for a call that is one node, and a further run knows it."""


class NeedsSharedInputs(Restart):
    """The example has one tensor as two inputs, and the model may notice that the run had two different ones."""


class NeedsHooks(Restart):
    """Forward reads what a forward hook stores, of a module that is kept whole, and so does not run its hooks."""


class WritesSharedTensor(Restart):
    """A tensor that the replica shares with the model is about to be written."""


class ThreadInterference(Signal):
    """Another thread may have changed what this trace relies on, so that it has to run again."""


class InternalTraceError(Signal):
    """A bug of featx raised an error in a repeated run; it must not be read as an error of the model."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SecondCallDiffers(Signal):
    """What a second call does asks for a first one under other conditions."""


class SubmoduleNotRepeatable(SecondCallDiffers):
    """The module at `path` is to be kept whole: a later call of it may differ from the first one, as `reason` says."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path)
        self.path, self.reason = path, reason


class ReadInNextCall(SecondCallDiffers):
    """The second call reads attributes that the first one assigns, and that were taken away for both."""

    def __init__(self, attributes: set[tuple[str, str]]) -> None:
        super().__init__()
        self.attributes = attributes


class ReadsStored(SecondCallDiffers):
    """Code reads attributes that forward changes and that its source did not show to be read."""


class DependsOnAutocast(SecondCallDiffers):
    """Forward sets or reads the autocast state in a way that only the profiling hook can observe."""


class DependsOnGradients(SecondCallDiffers):
    """Forward does something else where gradients are switched off, and was not seen to ask whether they are."""


class PossibleThreadInterference(ThreadInterference):
    """Another thread has run, of Python or of torch's kernels, while this trace computed with values of its input."""


class UnsupportedSideEffect(Untraceable):
    """Forward has a side effect that the next call would see. It is an error even after the last requested value."""


class RunsOnOtherParameters(Untraceable):
    """A module runs with other parameters than its own, as by torch.func.functional_call: it cannot be one node."""


class ModifiedFromOutside(UnsupportedSideEffect):
    """Code around a module that is kept whole has changed the module's attributes."""


# The errors with which a further run may end: whoever asked for it goes on without it.
GAVE_UP = (Diverged, NeedsRealValues, Exception)


def error_that_refuses(name: str, what: str, place: str = "", advice: str = "") -> TraceError:
    """Return the error that says what keeps the model `name` from being traced, in which code, and what to do."""
    where = f"{what} {place}".rstrip(" ,")
    return TraceError(f"cannot trace {name}: {where}. To go on, {advice or KEEP_WHOLE_ADVICE}.")
