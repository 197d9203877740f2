"""What is computed inside of calls that are one node, in a run for real: a hook may hand it out past the result."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from featx.tracing.history.opaque_call import OpaqueCall
from featx.tree import tree_leaves


class MadeInside:
    """The tensors that kernels inside of such calls have computed from tensors of the graph, or from one another.

    In a run without values these are stand-ins that no recorded call returned, which identifies them too.

    Args:
        whole: says whether the running code is inside of such a call.
        is_of_graph: says whether there is a tensor of the model, or one that is followed, among values.
    """

    def __init__(self, whole: OpaqueCall, is_of_graph: Callable[[tuple[Any, ...]], bool]) -> None:
        self._whole = whole
        self._is_of_graph = is_of_graph
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, given: list[torch.Tensor], result: Any) -> None:
        """Take note of a kernel: its inputs, and its result."""
        if self._whole.is_inside and (any(each in self for each in given) or self._is_of_graph(tuple(given))):
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._known[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        reference = self._known.get(id(tensor))
        return reference is not None and reference() is tensor
