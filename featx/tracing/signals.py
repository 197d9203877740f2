"""What ends a trace on an example, or starts it anew. No Exceptions, so that no model catches them."""

from __future__ import annotations

from typing import Any

from featx.libraries import way_without
from featx.tracing.source.frames import describe, line_of, user_frame


class Unfollowable(BaseException):
    """Something in an opened module that no graph can hold. No Exception, so that no model catches it.

    `value` is the object that it is about, if there is one; `advice` says what to do.
    """

    def __init__(self, what: str, value: object = None, *, advice: str = "") -> None:
        super().__init__(what)
        frame = user_frame()
        self.advice = advice or way_without(value)
        self.what, self.line, self.place = what, line_of(frame), describe(frame)


class NeedsValues(BaseException):
    """The model asks for a value, which stand-ins have not. No Exception, so that no model catches it."""


class Enough(BaseException):
    """A further run has done what matters for the wanted nodes. No Exception, so that no model catches it."""


class Unholdable(Unfollowable):
    """A value that no graph can hold is passed to a call that is one node."""


class AssignedAnew(BaseException):
    """Forward assigned a value of its input to an attribute that it also reads: of this call, or of the last one?"""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(name)
        self.attribute = (path, name)


class Converts(BaseException):
    """The code of a Python module converts a traced number, and the trace does not listen there."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__()
        self.namespace = namespace


class SharesInputs(BaseException):
    """One tensor is two inputs of the example, which matters to the model; it was traced on one for each."""


class Disturbed(BaseException):
    """Another thread may have changed what this trace relies on, so that it has to run again."""


class OwnFault(BaseException):
    """Code of featx itself has failed in a further run of the model; that is no refusal of the model."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class DiffersInside(BaseException):
    """A second call differs from the first one in what the module at `path` does: it is to be kept whole."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class GoesByAutocast(BaseException):
    """Forward sets or asks for the state of autocast in a way that shows only where its calls are heard."""


class MayBeDisturbed(Disturbed):
    """Another thread has run, of Python or of torch's kernels, while this trace computed with values of its input."""


class LeftBehind(Unfollowable):
    """What forward left somewhere, which the next call would find; it matters although all that is wanted is there."""


class ChangedByOthers(LeftBehind):
    """Code around a module that is kept whole has changed the module's attributes."""
