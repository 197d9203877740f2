"""Shapes that depend on values, such as that of `nonzero`: those of a run with values, for later runs without.

A run without values cannot know how many detections are left after non-maximum suppression. It takes as many as the run
with values found. Code that depends on their number shows in a run of its own, see `data_dependent_numbers`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from featx.tracing.environment.fake_tensor_log import failures_expected
from featx.tracing.signals import NeedsRealValues
from featx.tracing.stand_ins.known_results import key_of_call
from featx.tree import tensors_in, tree_map

_INDEXING = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor})
_MASKS = (torch.bool, torch.uint8)


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class DynamicShapes:
    """The layouts of the results of kernels whose shapes depend on values, in one run.

    Attributes:
        found: those of this run, in order, if it has values.
        are_expected: whether this run takes its lengths from an earlier one.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Any, list[_Layout]]] = []
        self._expected: list[tuple[Any, list[_Layout]]] = []
        self._taken = 0
        self.are_expected = False
        # What kernels return in a fake mode, by what this depends on. It is shared with the runs that follow.
        self._known: dict[Any, Any] = {}
        self._fake_mode: Any = None

    def expect(self, earlier: DynamicShapes) -> None:
        """Take the lengths of this run, which has no values, from those of an earlier one."""
        self._expected, self._taken, self._known = list(earlier.found), 0, earlier._known
        self.are_expected = bool(self._expected)

    def note_place(self) -> Callable[[], bool]:
        """Return what says, later, whether lengths have been taken since now."""
        taken = self._taken
        return lambda: self._taken != taken

    @contextmanager
    def peeking(self) -> Generator[None]:
        """Take the expected lengths for kernels that run again afterwards, with values."""
        taken = self._taken
        try:
            yield
        finally:
            self._taken = taken

    def mark(self) -> tuple[int, int]:
        """Return what `forget` needs to take back everything from now on."""
        return len(self.found), self._taken

    def forget(self, mark: tuple[int, int]) -> None:
        """Take back the layouts since `mark`; those of an earlier run are expected again."""
        found, self._taken = mark
        del self.found[found:]

    def note(self, kernel: Any, result: Any) -> None:
        """Keep the layouts of what a kernel has computed."""
        self.found.append((kernel, [_Layout(tuple(leaf.shape), leaf.stride()) for leaf in tensors_in(result)]))

    def run(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return tensors without values of the form that a kernel may return.

        Raises:
            NeedsRealValues: the form is not known.
        """
        if self._taken >= len(self._expected) or self._expected[self._taken][0] is not kernel:
            raise NeedsRealValues
        known = self._expected[self._taken][1]
        self._taken += 1
        if any(not leaf.is_meta for leaf in tensors_in((args, kwargs))):
            return kernel(*args, **kwargs)  # small inputs, which have values
        key = key_of_call(kernel, args, kwargs)
        if key is None or key not in self._known:
            self._known[key] = self._fake_result(kernel, args, kwargs)
        fake = self._known[key]
        if len(tensors_in(fake)) != len(known):
            raise NeedsRealValues
        layouts = iter(known)
        return tree_map(lambda leaf: _as_meta(leaf, next(layouts)) if isinstance(leaf, torch.Tensor) else leaf, fake)

    def _fake_result(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Importing torch's support for unknown sizes takes a second; it is done for models that need it.
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._fake_mode = self._fake_mode or FakeTensorMode(shape_env=ShapeEnv())
        try:
            with failures_expected(), self._fake_mode:
                args, kwargs = tree_map(_as_fake, (args, kwargs))
                return kernel(*args, **kwargs)
        except Exception as error:
            raise NeedsRealValues from error


def may_have_dynamic_shape(kernel: Any, args: tuple[Any, ...]) -> bool:
    """Say whether the shape of what a kernel returns depends on values, or may do so."""
    if kernel in _INDEXING:
        indices = args[1] if len(args) > 1 else ()
        return any(index is not None and index.dtype in _MASKS for index in indices)
    if torch.Tag.dynamic_output_shape in getattr(kernel, "tags", ()):
        return True
    return getattr(kernel, "namespace", "aten") != "aten"


def _as_fake(leaf: Any) -> Any:
    """Return a tensor of the active fake mode that has the layout of `leaf`, if that is a tensor."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")


def _as_meta(fake: torch.Tensor, known: _Layout) -> torch.Tensor:
    """Return a tensor on the meta device, with the lengths of `known` where those of `fake` depend on values."""
    if fake.dim() != len(known.shape):
        raise NeedsRealValues
    lengths = [size if type(size) is int else length for size, length in zip(fake.shape, known.shape, strict=True)]
    strides, step = [0] * len(lengths), 1
    for dim in sorted(range(len(lengths)), key=lambda dim: (known.strides[dim], -dim)):
        strides[dim] = step
        step *= max(lengths[dim], 1)
    return torch.empty_strided(lengths, strides, dtype=fake.dtype, device="meta")
