"""SizeRuns: runs of a model at other sizes than its example's, and what they show."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from featx.errors import FeatxError
from featx.ir.equality import first_difference
from featx.ir.node import Node
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.guards.disguises import Disguise, disguise_as_a_bit_larger, disguise_as_larger, disguise_as_zero
from featx.tracing.guards.guards import check_decision
from featx.tracing.signals import Diverged, NeedsRealValues, ThreadInterference
from featx.tracing.sizes.groups import Group
from featx.tracing.sizes.outcomes import (
    ASKS_FOR_VALUES,
    BROKE_OFF,
    CHANGED,
    FREE,
    TOO_MANY_FAILED,
    UNTRACEABLE,
    Outcome,
    refusal,
)
from featx.tracing.sizes.resizing import (
    OTHER_SIZES_FOR_REAL,
    Dim,
    OtherSize,
    has_equal_products,
    other_size,
    other_size_for_real,
    resized,
    twice,
)
from featx.tracing.sizes.same_needed import join_measured, matches_needed_nodes
from featx.tracing.source.location import names_in

# How much runs for real at other sizes may compute, those that fail too: so many times what the first one has, or so
# many elements, which take about a second.
_RUNS_IN_ALL = 2
_FEWEST_ELEMENTS = 100_000_000
_NUMPY = frozenset({"np", "numpy"})


class SizeRuns:
    """Runs of one model at other sizes than those of its example, each compared with the trace on the example.

    Args:
        request: what is traced, on the example.
        trace: the trace at the size of the example.
        before: `trace`, if its replica is still there and a second call does what the first one did. Then the runs
            are further calls on it, up to one that breaks off and leaves it changed. Afterwards the last such call.

    Attributes:
        before: see above.
        inputs: the tensors among the inputs that are given other sizes.
        codes: the code of the model that may have run.
        all_larger: as what C code sees the numbers in place of which others come: the first one as a rule.
        sizes: for groups that the model takes at some other sizes only, the size to try.
        has_decided_otherwise: whether the last run has gone another way at a decision of which the graph has a check.
    """

    def __init__(self, request: TraceRequest, trace: ExampleTrace, *, before: ExampleTrace | None) -> None:
        self.before = before
        self.inputs: list[torch.Tensor] = []
        self.codes = trace.final_checks.codes_that_may_have_run()
        self.sizes: dict[Group, OtherSize] = {}
        self.has_decided_otherwise = False
        # The positions of the numbers that were others, and so disguised, in runs that did the same, by the disguise.
        self._shown: dict[Disguise, set[int]] = {}
        self._request = request
        self._trace = trace
        self._most_computed = request.tracer.computed + max(_RUNS_IN_ALL * trace.computed, _FEWEST_ELEMENTS)
        # As what C code sees numbers first. What numpy makes of large ones (`np.meshgrid`) would not fit in memory.
        self._uses_numpy = any(not names_in(code).isdisjoint(_NUMPY) for code in self.codes)
        bit_larger: tuple[Disguise, ...] = (disguise_as_a_bit_larger,) if self._uses_numpy else ()
        self.all_larger = (*bit_larger, disguise_as_larger)

    def outcome(self, groups: list[Group], disguise: Disguise | None = None, *, is_limited: bool = True) -> Outcome:
        """Run at other sizes of all groups at once, and return what that shows of them.

        Args:
            groups: the groups.
            disguise: as what C code sees the numbers in place of which others come.
            is_limited: it does not run for real where such runs have computed a lot.
        """
        disguise = disguise or self.all_larger[0]
        self.has_decided_otherwise = False
        if self._trace.is_real:
            outcome = self.outcome_without_values(groups, disguise)
            if outcome is not None and (outcome.is_free or self._trace.is_large):
                return outcome
            if is_limited and self._request.tracer.computed > self._most_computed:
                return TOO_MANY_FAILED
        try:
            again = self._run(groups, disguise, has_values=self._trace.is_real)
        except Diverged:
            self._leave_if_changed()
            return CHANGED
        except (NeedsRealValues, Exception) as error:
            self._leave_if_changed()
            if isinstance(error, NeedsRealValues):
                return ASKS_FOR_VALUES
            return UNTRACEABLE if isinstance(error, FeatxError) else refusal(error, uses_numpy=self._uses_numpy)
        if self.before is not None:
            self.before = again
        if again.early_stop_reason is not None:
            self._leave_if_changed()
        if self._is_same(again, disguise):
            return FREE
        self.has_decided_otherwise = _is_decision(first_difference(again.graph, self._trace.graph))
        return CHANGED if again.early_stop_reason is None else BROKE_OFF

    def outcome_at_once(self, groups: list[Group], disguise: Disguise) -> Outcome:
        """Try other lengths of all groups, and where the model refuses these, some that more models take together."""
        outcome = self.outcome(groups, disguise)
        if outcome.is_refusal:
            usual, self.sizes = self.sizes, {**dict.fromkeys(groups, twice), **self.sizes}
            outcome = self.outcome(groups, disguise)
            self.sizes = usual
        return outcome

    def shown_otherwise(self) -> frozenset[int]:
        """Return the positions of the numbers that C code has seen as larger ones and as zero, and did the same."""
        larger = set[int]().union(*(self._shown.get(each, ()) for each in self.all_larger))
        return frozenset(larger & self._shown.get(disguise_as_zero, set()))

    def _is_same(self, again: ExampleTrace, disguise: Disguise) -> bool:
        if not matches_needed_nodes(again, self._trace):
            return False
        join_measured(self._trace.graph, again.graph, self._trace.needed)
        # A run that has all that is needed ends, and has fewer numbers.
        pairs = zip(self._trace.numbers.values, again.numbers.values, strict=False)
        others = {place for place, (number, other) in enumerate(pairs) if number != other}
        self._shown.setdefault(disguise, set()).update(others)
        return True

    def outcome_without_values(self, groups: list[Group], disguise: Disguise) -> Outcome | None:
        """Return what a trace without values finds, which is told what the one for real read of them; None if it fails.

        It is told the lengths of results too. The graph checks when it runs that it reads the same values. CHANGED may
        come from lengths that the values of such inputs would not give, so that a trace for real might find FREE.
        """
        try:
            again = self._run(groups, disguise, has_values=False)
        except Diverged:
            return CHANGED
        except (NeedsRealValues, Exception):
            return None
        return FREE if self._is_same(again, disguise) else CHANGED

    def _leave_if_changed(self) -> None:
        # A call that has broken off may have left its replica in a state that no whole call leaves.
        if self.before is not None and not self.before.checks.states.are_as_at_the_start():
            self.before = None

    def _run(self, groups: list[Group], disguise: Disguise, *, has_values: bool) -> ExampleTrace:
        changes = self._changes(groups, other_size)
        for other in OTHER_SIZES_FOR_REAL if has_values else ():
            for_real = self._changes(groups, other)
            if not any(has_equal_products(tensor, for_real) for tensor in self.inputs):
                changes = for_real
                break
        first = self._trace
        run = functools.partial(resized(self._request, changes, has_values).run, first)
        reason = _reason(groups, changes, disguise)
        conditions = Conditions(
            reason, has_values, first.gradients, earlier=first, disguise=disguise, before=self.before
        )
        try:
            return run(conditions)
        except ThreadInterference:
            self.before = None  # a replica is not called again after that; on a new one the trace repeats itself
            return run(replace(conditions, before=None))

    def run_at(self, groups: list[Group], size: OtherSize | None, before: ExampleTrace | None = None) -> ExampleTrace:
        """Return a whole run at other sizes, with `before` as in `Conditions`. Its replica is kept."""
        first = self._trace
        usual = size or (other_size_for_real if first.is_real else other_size)
        changes = self._changes(groups, usual)
        reason = "with caches that a call has filled" if before else "with empty caches"
        sizes = _reason(groups, changes, disguise_as_larger) if groups else "the example"
        conditions = Conditions(f"{sizes}, {reason}", first.is_real, first.gradients, before=before)
        return resized(self._request, changes, first.is_real).run(first, conditions)

    def _changes(self, groups: list[Group], usual: OtherSize) -> dict[Dim, int]:
        return {
            dim: self.sizes.get(group, usual)(group.position, group.size, number)
            for number, group in enumerate(groups)
            for dim in group.dims
        }


def _is_decision(difference: tuple[Node, Node] | None) -> bool:
    """Say whether graphs differ first in the answers to one question."""
    if difference is None:
        return False
    checks = [node.args[1:2] for node in difference if node.target is check_decision]
    return len(checks) == 2 and all(type(answer) is bool for (answer,) in checks) and checks[0] != checks[1]


def _reason(groups: list[Group], changes: Mapping[Dim, int], disguise: Disguise) -> str:
    sizes = [f"{group.size} as {changes[group.dims[0]]} at {group.position}" for group in groups]
    shown = "" if disguise in (disguise_as_larger, disguise_as_a_bit_larger) else f", shown as {disguise.__name__}"
    return f"other sizes ({', '.join(sizes)}{shown})"
