"""Signals that end a run of the example tracer or restart it. `except Exception` in a model does not catch them."""

from __future__ import annotations

from typing import Any

from featx.libraries import advice_for
from featx.tracing.source.frames import describe, line_of, user_frame


class Untraceable(BaseException):
    """An opened module does something that a graph cannot express.

    `value` is the object that it is about, if there is one; `advice` says what to do.
    """

    def __init__(self, what: str, value: object = None, *, advice: str = "") -> None:
        super().__init__(what)
        frame = user_frame()
        self.advice = advice or advice_for(value)
        self.what, self.line, self.place = what, line_of(frame), describe(frame)


class NeedsRealValues(BaseException):
    """The model reads a tensor value, and the tensors of this run have no values."""


class AllNeededRecorded(BaseException):
    """A repeated run has recorded all nodes that the requested values need."""


class UnsupportedValue(Untraceable):
    """A value that no graph can hold is passed to a call that is one node."""


class ReadOrderUnknown(BaseException):
    """Forward assigns an input-dependent value to an attribute and reads it; the order of the two is not known."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(name)
        self.attribute = (path, name)


class NeedsConversionTracking(BaseException):
    """Code converts a traced number in a file whose names `int`, `float` and `len` are not replaced yet."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__()
        self.namespace = namespace


class NeedsPlainValueChecks(BaseException):
    """Forward changes a number or text of its Python file, and it is not known which module does it."""


class NeedsFixedKeys(BaseException):
    """A dict that a size was looked up in as a text has other keys too: what is found there depends on the size."""


class ChangesOuterValues(BaseException):
    """Forward sets something outside of its modules for a call that is one node, and a further run knows it."""


class NeedsSharedInputs(BaseException):
    """The example has one tensor as two inputs, and the model may notice that the run had two different ones."""


class ThreadInterference(BaseException):
    """Another thread may have changed what this trace relies on, so that it has to run again."""


class InternalTraceError(BaseException):
    """A bug of featx raised an error in a repeated run; it must not be read as an error of the model."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class SubmoduleNotRepeatable(BaseException):
    """The module at `path` is to be kept whole: a later call of it may differ from the first one, as `reason` says."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path)
        self.path, self.reason = path, reason


class ReadInNextCall(BaseException):
    """The second call reads attributes that the first one assigns, and that were taken away for both."""

    def __init__(self, attributes: set[tuple[str, str]]) -> None:
        super().__init__()
        self.attributes = attributes


class DependsOnAutocast(BaseException):
    """Forward sets or reads the autocast state in a way that only the profiling hook can observe."""


class PossibleThreadInterference(ThreadInterference):
    """Another thread has run, of Python or of torch's kernels, while this trace computed with values of its input."""


class UnsupportedSideEffect(Untraceable):
    """Forward has a side effect that the next call would see. It is an error even after the last requested value."""


class RunsOnOtherParameters(Untraceable):
    """A module runs with other parameters than its own, as by torch.func.functional_call: it cannot be one node."""


class ModifiedFromOutside(UnsupportedSideEffect):
    """Code around a module that is kept whole has changed the module's attributes."""
