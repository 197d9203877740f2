"""Find dimensions of which a later call must not have another length, because the first call has cached its own.

`if self.table is None: self.table = build(n)` computes for the length of the first call alone. A graph computes the
table in each call. So a call at another length follows one at the length of the example, on one replica, and must use
what a first call at that length uses. What is made of sizes and constants is compared by its values: a model may take
the first part of a longer table.
"""

from __future__ import annotations

from typing import Any

import torch

from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ATTEMPTS
from featx.tracing.freedom.constant_values import ConstantValues
from featx.tracing.freedom.outcomes import STALE, Outcome
from featx.tracing.freedom.resizing import Dim, OtherSize
from featx.tracing.freedom.variation import Group, Variation
from featx.tracing.signals import GAVE_UP, ThreadInterference


def stale_dims(variation: Variation) -> dict[Dim, Outcome]:
    """Return the free dimensions of `variation` of which a later call must not have another length.

    Three runs for each of two other lengths of each dimension, and of all together: a change of one may fill the cache
    anew for all. Only for models that fill caches.
    """
    groups = variation.free_groups
    stale = [group for group in groups if not _is_free(variation, [group])]
    others = [group for group in groups if group not in stale]
    if len(others) > 1 and not _is_free(variation, others):
        stale = groups
    return {dim: STALE for group in stale for dim in group.dims}


def _is_free(variation: Variation, groups: list[Group]) -> bool:
    # Half of one sample is that sample: a second call with it has been compared with the first one.
    sizes = [size for size in (None, _half) if size is None or any(group.size > 1 for group in groups)]
    return all(_is_fresh(variation, groups, size) for size in sizes)


def _half(position: int, size: int, number: int) -> int:
    return max(size // 2, 1)


def _is_fresh(variation: Variation, groups: list[Group], size: OtherSize | None) -> bool:
    """Say whether a call at other sizes does the same after one at the sizes of the example as without that."""
    for _ in range(ATTEMPTS):
        try:
            try:
                fresh = variation.run_at(groups, size)
            except GAVE_UP:
                return True  # the model takes no such sizes
            with torch.no_grad():
                return _does_the_same(variation, groups, size, fresh)
        except ThreadInterference:
            continue
    return False


def _does_the_same(variation: Variation, groups: list[Group], size: OtherSize | None, fresh: ExampleTrace) -> bool:
    first = later = None
    try:
        first = variation.run_at([], None)
        later = variation.run_at(groups, size, before=first)
        if later.numbers.uses_earlier:  # what it does may depend on a length that was not tried
            return False
        calls: dict[Any, int] = {}
        kept = _values_kept_by(first, calls)
        return ConstantValues(later, calls, kept).steps == ConstantValues(fresh, calls, {}).steps
    except GAVE_UP:
        return False
    finally:
        for trace in (later, first, fresh):
            if trace is not None:
                trace.drop_replica()


def _values_kept_by(trace: ExampleTrace, calls: dict[Any, int]) -> dict[int, torch.Tensor]:
    """Return the values of the tensors without values that a call has kept, by their ids."""
    known = ConstantValues(trace, calls, {})
    values = {key: known.of(origin) for key, origin in trace.origins().items()}
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
