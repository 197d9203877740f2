"""Put what ends a call where it is read in place of attributes that forward is taken to change only."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from featx.tracing.signals import Diverged

# What code does to count, or to add to a list, dict or set. The result is one more of these objects.
_COUNTING = [f"__{prefix}{name}__" for name in ("add", "sub", "mul", "or", "and", "xor") for prefix in ("", "r", "i")]
_ADDING = (
    "append", "appendleft", "extend", "extendleft", "insert", "remove", "clear", "reverse", "sort", "add", "discard",
    "update", "__setitem__", "__delitem__",
)  # fmt: skip
# What Python looks up in the class.
_READING = [
    f"__{name}__"
    for name in (
        "bool len iter next contains getitem eq ne lt le gt ge hash index int float complex str repr format bytes call "
        "round abs neg pos invert floordiv truediv mod pow divmod rfloordiv rtruediv rmod rpow matmul enter exit"
    ).split()
]


class Unread:
    """Stands for a count, list, dict or set: takes what is added, and ends the call where anything else is asked."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Diverged


def _return_itself(self: Unread, *args: Any, **kwargs: Any) -> Unread:
    return self


def _return_nothing(self: Unread, *args: Any, **kwargs: Any) -> None:
    return None


def _end_the_call(self: Unread, *args: Any, **kwargs: Any) -> NoReturn:
    raise Diverged


for _names, _method in ((_COUNTING, _return_itself), (_ADDING, _return_nothing), (_READING, _end_the_call)):
    for _name in _names:
        setattr(Unread, _name, _method)


@contextmanager
def unread(attributes: Iterable[tuple[nn.Module, str]]) -> Generator[None]:
    """Put `Unread` in place of attributes, by module and name; afterwards they are what they were."""
    before = [(module.__dict__, name, module.__dict__[name]) for module, name in attributes]
    try:
        for held, name, _ in before:
            held[name] = Unread()
        yield
    finally:
        for held, name, value in before:
            held[name] = value
