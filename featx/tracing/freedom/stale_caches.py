"""Find dimensions of which a later call must not have another length, because the first call has cached its own.

`if self.table is None: self.table = build(n)` computes for the length of the first call alone. A graph computes the
table in each call. So calls at other lengths follow one at the length of the example, on one replica, and must use what
a first call at that length uses. What is made of sizes and constants is compared by its values: a model may take the
first part of a longer table. In which dtype a table was made is checked when the graph runs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from featx.ir.ancestors import with_ancestors
from featx.ir.form import reads_form, sources_of_values
from featx.ir.node import Node
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.tracer import ATTEMPTS
from featx.tracing.freedom.constant_values import ConstantValues
from featx.tracing.guards.guards import add_check, check_decision
from featx.tracing.side_effects.forward_side_effects import depends_on_inputs
from featx.tracing.side_effects.left import Left
from featx.tracing.signals import GAVE_UP, ThreadInterference
from featx.tracing.sizes.groups import Group
from featx.tracing.sizes.outcomes import STALE, Outcome
from featx.tracing.sizes.resizing import Dim, OtherSize
from featx.tracing.sizes.variation import Variation


def stale_dims(variation: Variation) -> dict[Dim, Outcome]:
    """Return the free dimensions of `variation` of which a later call must not have another length.

    Six runs for each dimension, six for all together, as a change of one may fill the cache anew for all, and three for
    two of them. Only for models that fill caches.
    """
    groups = variation.free_groups
    stale = [group for group in groups if not _is_free(variation, [group])]
    others = [group for group in groups if group not in stale]
    if len(others) > 1 and not _is_free(variation, others):
        stale = groups
    pair = _exchangeable([group for group in groups if group not in stale])
    if pair and not _is_fresh_at(variation, pair, [_exchanged]):
        stale = [*stale, *pair]
    return {dim: STALE for group in stale for dim in group.dims}


def _is_free(variation: Variation, groups: list[Group]) -> bool:
    # A cache that has grown may be of a length that no first call would give it, so the half comes again after it.
    # Half of one sample is that sample: a second call with it has been compared with the first one.
    has_half = any(group.size > 1 for group in groups)
    return _is_fresh_at(variation, groups, [_half, None, _half] if has_half else [None])


def _is_fresh_at(variation: Variation, groups: list[Group], sizes: list[OtherSize | None]) -> bool:
    for _ in range(ATTEMPTS):
        with contextlib.suppress(ThreadInterference):
            return _are_fresh(variation, groups, sizes)
    return False


def _half(position: int, size: int, number: int) -> int:
    return max(size // 2, 1)


def _exchangeable(groups: list[Group]) -> list[Group]:
    """Return two groups after the first dimension, the second of an even length; none where there are no such two."""
    behind = [group for group in groups if group.position > 0]
    halved = next((group for group in reversed(behind) if group.size % 2 == 0), None)
    doubled = next((group for group in behind if group is not halved), None)
    return [] if halved is None or doubled is None else [doubled, halved]


def _exchanged(position: int, size: int, number: int) -> int:
    """Return other lengths for two groups whose product is the same, as the key of a cache may be: `h * w`."""
    return size // 2 if number else 2 * size


def _are_fresh(variation: Variation, groups: list[Group], sizes: list[OtherSize | None]) -> bool:
    """Say whether calls at other sizes, after one at the sizes of the example, do the same as first calls."""
    traces: list[ExampleTrace] = []
    try:
        fresh = {size: trace for size in dict.fromkeys(sizes) if (trace := _first_call(variation, groups, size))}
        traces += fresh.values()
        with torch.no_grad():
            return _do_the_same(variation, groups, [size for size in sizes if size in fresh], fresh, traces)
    except GAVE_UP:
        return False
    finally:
        for trace in reversed(traces):
            trace.drop_replica()


def _first_call(variation: Variation, groups: list[Group], size: OtherSize | None) -> ExampleTrace | None:
    """Return a first call at other sizes; None where the model takes no such sizes."""
    try:
        return variation.runs.run_at(groups, size)
    except ThreadInterference:
        raise
    except GAVE_UP:
        return None


def _do_the_same(
    variation: Variation,
    groups: list[Group],
    sizes: list[OtherSize | None],
    fresh: dict[OtherSize | None, ExampleTrace],
    traces: list[ExampleTrace],
) -> bool:
    """Compare later calls, on one replica, with first calls at their sizes; all traces are added to `traces`."""
    calls: dict[Any, int] = {}
    expected = {size: ConstantValues(trace, calls, {}).steps for size, trace in fresh.items()}
    # The values of the tensors without values that calls have kept, by their ids.
    kept: dict[int, torch.Tensor] = {}
    before = variation.runs.run_at([], None)
    traces.append(before)
    known = ConstantValues(before, calls, kept)
    for size in sizes:
        values = ((key, known.of(origin)) for key, origin in before.origins().items())
        kept.update({key: value for key, value in values if isinstance(value, torch.Tensor)})
        before = variation.runs.run_at(groups, size, before=before)
        traces.append(before)
        if before.numbers.uses_earlier:  # what it does may depend on a length that was not tried
            return False
        known = ConstantValues(before, calls, kept)
        if known.steps != expected[size]:
            return False
    return True


def pin_dtypes_of_caches(trace: ExampleTrace) -> None:
    """Check the dtypes in which a call has filled caches. O(nodes).

    A later call in another dtype, or with autocast, uses what is there, and a graph would compute it in the other one.
    """
    kept = [node for node in trace.graph.nodes if node.name in trace.cached]
    sources: dict[Node, None] = {}
    for node in sorted(with_ancestors(node for node in kept if not depends_on_inputs(node))):
        sources.update(dict.fromkeys(_asked_for_dtype(node)))
    for source in sources:
        dtype = source.meta.get("dtype")
        if not isinstance(dtype, torch.dtype):
            continue
        text = f"'{source.meta.get('qualified_name', source.name)}', in whose dtype the model keeps a table"
        with trace.graph.inserting_after(source):
            read = trace.graph.call_function(getattr, (source, "dtype"))
        with trace.graph.inserting_after(read):
            add_check(trace.graph, check_decision, read, dtype, f"the dtype of {text}")
        trace.checks.left.add(Left("", f"a table in {dtype}", is_for_one_length=True))


def _asked_for_dtype(node: Node) -> list[Node]:
    """Return the nodes whose dtype decides that of a node, and whose values do not: x of `table.type_as(x)`."""
    if reads_form(node):
        return node.all_input_nodes if node.target is getattr and node.args[1] == "dtype" else []
    values = sources_of_values(node)
    return [source for source in node.all_input_nodes if source not in values and "dtype" in source.meta]
