"""Objects that are nothing but their attributes."""

from __future__ import annotations

import datetime
import enum
import functools
import numbers
import sys
import types
from typing import Any, cast

import torch

from featx.rebuilding import slots_of

# The Python modules of the standard library whose plain objects models keep as their own. Others (loggers, paths,
# locks) belong to the process.
_CONTAINER_LIBRARIES = frozenset({"collections", "queue", "argparse", "types", "configparser"})
LIBRARIES = sys.stdlib_module_names | {"torch", "featx", "numpy"}
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by a `class` statement
# The types of numbers, texts, truth values and None.
PLAIN_TYPES = frozenset({bool, int, float, complex, str, type(None)})
# Other classes of values that nothing can change, so that code which counts with them puts another one in their place.
VALUES = (numbers.Number, datetime.date, datetime.time, datetime.timedelta, enum.Enum, slice, range, bytes)


def is_plain_value(value: object) -> bool:
    """Say whether a value is a number, a text, None, or a tuple of such. O(items)."""
    return type(value) in PLAIN_TYPES or (
        isinstance(value, tuple) and all(map(is_plain_value, cast(tuple[Any, ...], value)))
    )


def is_plain_object(value: object) -> bool:
    """Say whether an object is nothing but its attributes, and not one of a library in C or without any state."""
    kind = type(value)
    if kind is types.SimpleNamespace:
        return True
    if isinstance(value, (type, enum.Enum, BaseException, torch.nn.Module)):
        return False
    # A class that ABCMeta makes while the program runs says that its module is `abc`.
    library = next(base.__module__ for base in kind.__mro__ if base.__module__ != "abc").partition(".")[0]
    if not kind.__flags__ & _HEAP_TYPE or (library in LIBRARIES and library not in _CONTAINER_LIBRARIES):
        return False
    if not getattr(value, "__dict__", None) and not slots_of(kind) and not has_defaults(kind):
        return False  # a marker, which code compares by identity
    return all(base.__flags__ & _HEAP_TYPE or base is object or base.__module__ == "typing" for base in kind.__mro__)


@functools.cache
def has_defaults(kind: type) -> bool:
    """Say whether a class gives values to attributes that its objects may assign: `class Context: scale = 1.0`."""
    members = [item for base in kind.__mro__[:-1] for item in vars(base).items()]
    return any(
        not name.startswith(("__", "_abc_")) and not callable(member) and not hasattr(type(member), "__get__")
        for name, member in members
    )
