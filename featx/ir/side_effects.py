"""Mark functions that do something besides computing a value, so that calls of them are kept."""

from collections.abc import Callable
from typing import Any, TypeVar

from featx.errors import ArgumentTypeError

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "__featx_side_effect__"


def has_side_effect(fn: _F) -> _F:
    """Mark `fn` so that its calls stay although nothing reads what they return, and return it.

    Needed only for what looks pure: an operator whose schema says that it writes nothing. Python functions that featx
    does not know are kept anyway. The mark is an attribute of `fn`.

    Raises:
        ArgumentTypeError: `fn` is written in C and takes no attribute.
    """
    try:
        setattr(fn, _MARK, True)
    except (AttributeError, TypeError):
        raise ArgumentTypeError(f"{fn!r} cannot be marked; call it in a Python function, which is kept") from None
    return fn


def is_marked(function: Callable[..., Any]) -> bool:
    """Say whether `has_side_effect` marked a function."""
    return getattr(function, _MARK, False) is True
