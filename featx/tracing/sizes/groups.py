"""Groups of dimensions of the inputs of a model that get another length together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from featx.tracing.sizes.outcomes import TOO_MANY_FAILED, Outcome
from featx.tracing.sizes.resizing import Dim

_CHANNELS_OF_IMAGES = (1, 3, 4)


@dataclass(frozen=True, order=True)
class Group:
    """Dimensions that have one length, and change together. `position` is the first of theirs."""

    position: int
    size: int
    dims: tuple[Dim, ...]


def was_refused(group: Group, known: Mapping[Dim, Outcome]) -> bool:
    """Say whether the model refused other lengths of all dimensions of a group, or was not asked."""
    return all(_is_refused(dim, known) for dim in group.dims)


def _is_refused(dim: Dim, known: Mapping[Dim, Outcome]) -> bool:
    """Say whether the model refused other lengths, or was not asked because it had refused so many others."""
    return dim in known and (known[dim].is_refusal or known[dim] == TOO_MANY_FAILED)


def divided(groups: list[Group], known: Mapping[Dim, Outcome]) -> list[Group]:
    """Return the groups, with those divided in two of which the model has refused some dimensions and not others."""
    found: list[Group] = []
    for group in groups:
        refused = tuple(dim for dim in group.dims if _is_refused(dim, known))
        parts = refused, tuple(dim for dim in group.dims if dim not in refused)
        found += [replace(group, dims=part) for part in parts if part]
    return found


def groups_of(inputs: list[torch.Tensor]) -> tuple[list[Group], list[Group]]:
    """Return the groups of dimensions of the inputs, and those that are likely to be free."""
    members: dict[tuple[int, int], dict[int, None]] = {}
    likely: set[tuple[int, int]] = set()
    for tensor in inputs:
        for dim, size in enumerate(tensor.shape):
            members.setdefault((dim, size), {})[id(tensor)] = None
            is_channel = tensor.is_floating_point() and (
                (tensor.dim() != 3 and dim == 1) or (tensor.dim() == 3 and dim == 0 and size in _CHANNELS_OF_IMAGES)
            )
            if not is_channel:
                likely.add((dim, size))
    groups = {key: Group(*key, tuple((each, key[0]) for each in ids)) for key, ids in sorted(members.items())}
    return list(groups.values()), [group for key, group in groups.items() if key in likely]


def halves(group: Group, inputs: list[torch.Tensor]) -> Iterator[list[Group]]:
    """Yield pairs of groups: of the first and the last inputs, of every second one, and of heights and widths.

    The last pair is the first dimension of each input that is in the group, and the other ones.
    """
    places = {id(tensor): place for place, tensor in enumerate(inputs)}
    heights = {min(dim for dim in group.dims if dim[0] == tensor) for tensor, _ in group.dims}
    for is_in_second in (
        lambda dim: 2 * places[dim[0]] >= len(inputs),
        lambda dim: places[dim[0]] % 2 == 1,
        lambda dim: dim not in heights,
    ):
        first = tuple(dim for dim in group.dims if not is_in_second(dim))
        second = tuple(dim for dim in group.dims if dim not in first)
        if first and second:
            yield [Group(min(place for _, place in dims), group.size, dims) for dims in (first, second)]
