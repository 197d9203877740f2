"""States of objects in a model's Python files that are no containers: arrays, files in memory, generators, counters."""

from __future__ import annotations

import array
import ast
import io
import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from featx.tracing.file_globals.holders import Holder
from featx.tracing.objects.plain_objects import PLAIN_TYPES

# Larger ones are tables that are read, and copying them for each run would take longer than it.
_LARGEST_ARRAY = 1_000_000
_CHARACTERS_OF_COUNT = frozenset("count(,) 0123456789.-e")


class ObjectState:
    """The state of an object, which runs may change.

    Args:
        value: the object; None where another one takes its place.
        get: returns the state, in a form that compares.
        put: gives the object a state that `get` has returned.

    Attributes:
        value: the object, or None.
        left: the state that runs have left.
    """

    def __init__(self, value: Any, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.value, self._get, self._put = value, get, put
        self._before = self.left = get()

    @property
    def has_changed(self) -> bool:
        """Whether runs have left another state."""
        return self.left != self._before

    def restore(self) -> None:
        """Give the object the state that it had; remember the one that runs have left."""
        now = self._get()
        if now != self._before:
            self.left = now
            self._put(self._before)

    def put_left(self) -> None:
        """Give it the state that runs have left, for a further run on the same replica."""
        if self.has_changed:
            self._put(self.left)

    def forget_left(self) -> None:
        """Forget what runs have left: one on another replica follows."""
        self.left = self._before


def states_of_objects(holders: Iterable[Holder]) -> list[ObjectState]:
    """Return the states of the objects in globals, classes and containers. O(items)."""
    kinds = _kinds()
    places = ((holder, key, value) for holder in holders for key, value in holder.items_of(kinds))
    found = (kinds[type(value)](holder, key, value) for holder, key, value in places)
    return [state for state in found if state is not None]


def has_own_state(value: object) -> bool:
    """Say whether a value is such an object, or another iterator."""
    kind = type(value)
    return kind not in PLAIN_TYPES and (isinstance(value, Iterator) or kind in _kinds())


def is_counter(value: object) -> bool:
    """Say whether a value is an `itertools.count` of plain numbers."""
    return type(value) is itertools.count and _CHARACTERS_OF_COUNT.issuperset(repr(value))


def _kinds() -> dict[type, Callable[[Holder, Any, Any], ObjectState | None]]:
    numpy = sys.modules.get("numpy")  # which need not be installed
    if numpy is None:
        return _KINDS
    of_numpy = {numpy.ndarray: _of_array, numpy.random.Generator: _of_numpy_generator}
    return {**_KINDS, **of_numpy, numpy.random.RandomState: _of_legacy_numpy_generator}


def _of_count(holder: Holder, key: Any, count: Any) -> ObjectState | None:
    # It cannot be set, so another one takes its place: `count(3)` is how Python writes one.
    def put(text: str) -> None:
        holder.replace(key, itertools.count(*ast.literal_eval(f"({text[6:-1]},)")))

    return ObjectState(None, lambda: repr(holder.now()[key]), put) if is_counter(count) else None


def _of_sequence(holder: Holder, key: Any, value: Any) -> ObjectState:
    def put(items: Any) -> None:
        value[:] = items

    return ObjectState(value, lambda: value[:], put)


def _of_file(holder: Holder, key: Any, file: Any) -> ObjectState | None:
    def put(state: tuple[Any, int]) -> None:
        contents, position = state
        file.seek(0)
        file.truncate()
        file.write(contents)
        file.seek(position)

    return None if file.closed else ObjectState(file, lambda: (file.getvalue(), file.tell()), put)


def _of_random(holder: Holder, key: Any, generator: Any) -> ObjectState:
    return ObjectState(generator, generator.getstate, generator.setstate)


def _of_torch_generator(holder: Holder, key: Any, generator: torch.Generator) -> ObjectState:
    def get() -> bytes:
        with torch._C.DisableTorchFunction():
            return generator.get_state().numpy().tobytes()

    def put(state: bytes) -> None:
        with torch._C.DisableTorchFunction():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return ObjectState(generator, get, put)


def _of_numpy_generator(holder: Holder, key: Any, generator: Any) -> ObjectState:
    bits = generator.bit_generator

    def put(state: bytes) -> None:
        bits.state = pickle.loads(state)

    return ObjectState(generator, lambda: pickle.dumps(bits.state), put)


def _of_legacy_numpy_generator(holder: Holder, key: Any, generator: Any) -> ObjectState:
    def put(state: bytes) -> None:
        generator.set_state(pickle.loads(state))

    return ObjectState(generator, lambda: pickle.dumps(generator.get_state(legacy=False)), put)


def _of_view(holder: Holder, key: Any, view: memoryview) -> ObjectState | None:
    def put(state: bytes) -> None:
        view.cast("B")[:] = state

    is_plain = view.c_contiguous and not view.readonly and 0 < view.nbytes <= _LARGEST_ARRAY
    return ObjectState(view, view.tobytes, put) if is_plain else None


def _of_array(holder: Holder, key: Any, value: Any) -> ObjectState | None:
    def put(numbers: bytes) -> None:
        value.data.cast("B")[:] = numbers

    is_plain = value.dtype.kind in "biufc" and value.flags.c_contiguous and value.flags.writeable
    return ObjectState(value, value.tobytes, put) if is_plain and 0 < value.nbytes <= _LARGEST_ARRAY else None


_KINDS: dict[type, Callable[[Holder, Any, Any], ObjectState | None]] = {
    itertools.count: _of_count,
    bytearray: _of_sequence,
    array.array: _of_sequence,
    io.BytesIO: _of_file,
    io.StringIO: _of_file,
    random.Random: _of_random,
    torch.Generator: _of_torch_generator,
    memoryview: _of_view,
}
