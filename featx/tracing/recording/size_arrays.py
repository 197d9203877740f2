"""Arrays that numpy makes of sizes, and of which torch makes tensors: `torch.tensor(np.linspace(0, 1, n))`.

An array is an object of numpy, which tells nobody what is done with it. So it is followed from its constructor to the
call of torch alone, and only if nothing has been written into it. Whatever else reads it finds a constant. In a trace
at another size, the array is made of disguised numbers, as C code sees them, so that what has read it differs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from featx.ir.effects import MeasuredEffects
from featx.ir.node import Node
from featx.tracing.guards.scalars import TracedNumber, pin_all, plain_numbers, shown_number
from featx.tracing.objects.arrays import is_array_of_numbers, tensor_of
from featx.tracing.objects.replaced_globals import original_of
from featx.tracing.signals import Untraceable
from featx.tree import tree_leaves

if TYPE_CHECKING:
    from featx.tracing.recording.recorder import Recorder

_FILLED = ("zeros", "ones", "full")
# By which items of a disguised array are other ones.
_OFFSET = 3.0625
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Made:
    """An array that numpy has made.

    Attributes:
        array: the model has it.
        before: a copy of it; None where it cannot be written.
        value: what numpy makes of the true numbers.
        node: the call.
    """

    array: Any
    before: Any
    value: Any
    node: Node

    def is_unchanged(self) -> bool:
        """Say whether nothing was written into the array. O(size)."""
        return self.before is None or _is_same(self.array, self.before)


class SizeArrays:
    """The arrays that numpy has made of traced numbers in one trace."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: dict[int, _Made] = {}
        # Arrays whose memory a tensor shares in the model, with that tensor.
        self._shared: list[tuple[_Made, torch.Tensor]] = []
        # Further such arrays, with what was in them.
        self._constants: list[tuple[Any, Any]] = []

    def mark(self) -> tuple[int, int, int]:
        """Return what `forget` needs to take back everything from now on."""
        return len(self._made), len(self._shared), len(self._constants)

    def forget(self, mark: tuple[int, int, int]) -> None:
        """Take back what was noted since `mark`."""
        made, shared, constants = mark
        del self._constants[constants:]
        while len(self._made) > made:
            self._made.popitem()
        del self._shared[shared:]

    def make(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a constructor of numpy, and record it if its arguments are plain."""
        named_args = _with_names_of_dtypes(args)
        named_kwargs = {key: _with_names_of_dtypes(value) for key, value in kwargs.items()}
        leaves = list(tree_leaves((named_args, named_kwargs)))
        if not all(isinstance(leaf, (*_PLAIN, TracedNumber)) for leaf in leaves):
            return function(*args, **kwargs)
        try:
            value = function(*plain_numbers(named_args), **plain_numbers(named_kwargs))
        except Exception:  # the model may catch it, and goes another way then
            pin_all(leaves)
            raise
        # linspace may return the distance too. With columns first, a copy would have other strides.
        if not is_array_of_numbers(value) or not value.flags.c_contiguous:
            return function(*args, **kwargs)
        recorder = self._recorder
        arguments, keywords = recorder.create_args(named_args), recorder.create_kwargs(named_kwargs)
        node = recorder.add_unnamed_node("call_function", function, arguments, keywords)
        node.meta["effects"] = MeasuredEffects()
        if any(isinstance(leaf, TracedNumber) and leaf.is_disguised for leaf in leaves):
            shown = {key: _as_shown(item) for key, item in named_kwargs.items()}
            array = _disguised(function, _as_shown(named_args), shown)
        else:
            array = value.copy()
        before = array.copy() if array.flags.writeable else None
        self._made[id(array)] = _Made(array, before, value, node)
        return array

    def as_tensor(self, array: Any, *, is_shared: bool) -> torch.Tensor | None:
        """Return a followed tensor of an array; None if it is not followed. O(size).

        With `is_shared` the model's tensor has the memory of the array.
        """
        made = self._made.get(id(array))
        if made is None or made.node.is_erased or not made.is_unchanged():
            return None
        recorder = self._recorder
        tensor = tensor_of(made.value)
        node = recorder.add_unnamed_node("call_function", torch.from_numpy, (made.node,), {})
        recorder.lineage.put(tensor, node)
        recorder.earlier.forget(tensor)
        recorder.write_log.note_memory(tensor)
        recorder.note_form(node, tensor)
        if is_shared:
            self._shared.append((made, tensor))
        return tensor

    def note_constant(self, array: Any, tensor: torch.Tensor) -> None:
        """Take note of a tensor of an array that is not followed, if they share memory. O(size)."""
        if tensor.data_ptr() == array.ctypes.data:
            self._constants.append((array, array.copy()))

    def check(self) -> None:
        """Raise if forward has written memory that an array and a tensor share, and forget all arrays.

        Raises:
            Untraceable: it has. A graph has no array that the write could change.
        """
        shared = [(made, tensor) for made, tensor in self._shared if not made.node.is_erased]
        constants = self._constants
        self._made, self._shared, self._constants = {}, [], []
        are_written = [not made.is_unchanged() or tensor._version > 0 for made, tensor in shared]
        if any(are_written) or not all(_is_same(array, before) for array, before in constants):
            raise Untraceable("forward writes the memory that an array of numpy shares with a tensor,")


def _is_same(array: Any, other: Any) -> bool:
    is_same_form = array.shape == other.shape and array.dtype == other.dtype
    return is_same_form and array.tobytes() == other.tobytes()


def _with_names_of_dtypes(value: Any) -> Any:
    """Return `value` with dtypes in tuples and lists as their names, which generated code can write."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_with_names_of_dtypes, value))
    numpy, value = sys.modules["numpy"], original_of(value)
    is_dtype = (
        isinstance(value, numpy.dtype) or any(value is kind for kind in (bool, int, float)) or _is_scalar_class(value)
    )
    return numpy.dtype(value).name if is_dtype else value


def _is_scalar_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, sys.modules["numpy"].generic)


def _as_shown(value: Any) -> Any:
    """Return `value` with traced numbers in tuples and lists as plain ones, as C code sees them."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_as_shown, value))
    return shown_number(value) if isinstance(value, TracedNumber) else value


def _disguised(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what C code makes of disguised numbers, with other items: a write is likely to write another value.

    Where all items are equal it takes no memory, and cannot be written.
    """
    if function.__name__ not in _FILLED:
        array = function(*args, **kwargs)
        return array + array.dtype.type(_OFFSET)
    numpy = sys.modules["numpy"]
    shape, *others = args or (kwargs["shape"],)
    item = function((), *others, **{key: value for key, value in kwargs.items() if key != "shape"})
    return numpy.broadcast_to(item, shape)
