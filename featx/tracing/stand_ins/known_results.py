"""Remember what torch functions return for tensors of a given form, so that an equal call need not run again.

torch computes the form of many results in Python, at up to a millisecond a call, and a model makes few distinct calls:
each layer of a transformer makes those of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from featx.tracing.objects.tensor_versions import versions_of

_META = torch.device("meta")
_KNOWN_BY_VALUE = frozenset(
    {int, float, bool, str, complex, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
     torch.memory_format}
)  # fmt: skip
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class _Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_gradient: bool


class KnownResults:
    """The forms of results that are one new tensor, by function and arguments without values."""

    def __init__(self) -> None:
        # None: the call must run each time.
        self._known: dict[Any, _Layout | None] = {}

    def get(self, key: Any) -> torch.Tensor | None:
        """Return a tensor of the form of the result, on the meta device, or None if the call must run."""
        layout = self._known.get(key)
        if layout is None:
            return None
        result = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=_META)
        return result.requires_grad_().clone() if layout.requires_gradient else result  # no leaf of the autograd graph

    def run(
        self, key: Any, call: Callable[[], Any], inputs: Collection[torch.Tensor], has_taken: Callable[[], bool] = bool
    ) -> Any:
        """Return the result of a call, and remember its form where that is all that the call has done.

        Args:
            key: what it is known by.
            call: runs it.
            inputs: the tensors that it gets.
            has_taken: says whether the call has taken more than its arguments, such as lengths of an earlier run.
        """
        if key is None or key in self._known:
            return call()
        before = versions_of(inputs)
        result = call()
        is_new = versions_of(inputs) == before and _is_new(result, inputs) and not has_taken()
        form = (result.shape, result.stride(), result.dtype, result.requires_grad) if is_new else None
        self._known[key] = None if form is None else _Layout(*form)
        return result


def key_of_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], without_gradient: Collection[int] = ()
) -> tuple[Any, ...] | None:
    """Return what the form of the result of a call depends on; None if its arguments do not say all of it.

    `without_gradient` are the ids of parameters in whose place the call gets tensors that require no gradient.
    """
    parts: list[Any] = [function, torch.is_grad_enabled(), torch.get_default_dtype()]
    is_known = _add(parts, args, without_gradient) and (not kwargs or _add(parts, kwargs, without_gradient))
    return tuple(parts) if is_known else None


def _add(parts: list[Any], value: Any, without_gradient: Collection[int]) -> bool:
    """Add to `parts` what a call can know of an argument; say whether that is all that it depends on."""
    kind = type(value)
    if kind in _TENSORS:
        requires_gradient = value.requires_grad and id(value) not in without_gradient
        parts += (value.shape, value.stride() if value.layout is torch.strided else (), value.dtype, requires_gradient)
        return value.layout is torch.strided
    parts.append(kind)
    if kind in _KNOWN_BY_VALUE:
        parts.append(value)
        return True
    if kind is dict:
        parts += value
        value = value.values()
    elif kind is not tuple and kind is not list and kind is not torch.Size:
        return False
    parts.append(len(value))
    return all(_add(parts, item, without_gradient) for item in value)


def _is_new(result: Any, inputs: Collection[torch.Tensor]) -> bool:
    """Say whether a result is a tensor in memory of its own."""
    if type(result) is not torch.Tensor or not result.is_meta or result.layout is not torch.strided:
        return False
    # A view of another new tensor, which nobody else has, is as good as one: on the meta device `linear` returns such.
    if result.is_conj() or result.is_neg() or (result._base is not None and result.storage_offset()):
        return False
    memory = result.untyped_storage()._cdata
    return all(each.layout is torch.strided and each.untyped_storage()._cdata != memory for each in inputs)
