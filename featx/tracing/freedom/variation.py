"""Trace a model at other sizes than its example's, and see which dimensions of the inputs leave the graph as it is."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch

from featx.errors import FeatxError
from featx.ir.effects import MeasuredEffects
from featx.ir.equality import first_nodes
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.operator_facts import name_of
from featx.tracing.example.conditions import Conditions
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.freedom.groups import Group, divided, groups_of, halves, was_refused
from featx.tracing.freedom.outcomes import (
    ASKS_FOR_VALUES,
    BROKE_OFF,
    CHANGED,
    FREE,
    IF_TAKEN,
    NOT_ALONE,
    NOT_ASKED,
    NOT_EMPTY,
    TOGETHER,
    TOO_MANY_FAILED,
    UNTRACEABLE,
    Outcome,
    refusal,
)
from featx.tracing.freedom.resizing import (
    OTHER_SIZES_FOR_REAL,
    Dim,
    OtherSize,
    has_equal_products,
    other_size,
    other_size_for_real,
    resized,
    twice,
)
from featx.tracing.freedom.same_needed import matches_needed_nodes
from featx.tracing.guards.disguises import (
    Disguise,
    disguise_as_a_bit_larger,
    disguise_as_larger,
    disguise_as_one,
    disguise_as_zero,
    disguises_in_reverse,
)
from featx.tracing.guards.scalars import plain_number
from featx.tracing.signals import Diverged, NeedsRealValues, ThreadInterference
from featx.tracing.source.location import names_in
from featx.tracing.source_uses.slices import has_computed_slices

_RUNS_ALONE = 3
# How much runs for real at other sizes may compute, those that fail too: so many times what the first one has, or so
# many elements, which take about a second.
_RUNS_IN_ALL = 2
_FEWEST_ELEMENTS = 100_000_000
_DISAGREE = {FREE, CHANGED}
_DOES_OTHERWISE = {CHANGED, BROKE_OFF}
_NUMPY = frozenset({"np", "numpy"})
# Functions of torch that give more or fewer parts of another length. `unbind` gives as many as there are.
_GIVES_PARTS_BY_LENGTH = frozenset({"chunk", "split", "unsafe_chunk", "unsafe_split"})


class Variation:
    """Traces of one model at other sizes than those of its example.

    Args:
        request: what is traced, on the example.
        trace: the trace at the size of the example.
        compared: the dimensions that the model compares with a number: they are fixed.
        matched: the dimensions of which the graph checks that they match others.
        before: `trace`, if its replica is still there and a second call does what the first one did. Then the traces
            are further calls on it, up to one that breaks off and leaves it changed. Afterwards the last such call.
    """

    def __init__(
        self,
        request: TraceRequest,
        trace: ExampleTrace,
        compared: Set[Dim],
        matched: Set[Dim],
        *,
        before: ExampleTrace | None,
    ) -> None:
        self.before = before
        self._request = request
        self._trace = trace
        self._compared = compared
        self._matched = matched
        self._is_large = trace.is_large
        # How many more whole runs for real may try one dimension that is not the first.
        self._runs_left = 0 if self._is_large else _RUNS_ALONE
        self._most_computed = request.tracer.computed + max(_RUNS_IN_ALL * trace.computed, _FEWEST_ELEMENTS)
        self._inputs: list[torch.Tensor] = []
        self._codes = trace.final_checks.codes_that_may_have_run()
        # As what C code sees numbers first. What numpy makes of large ones (`np.meshgrid`) would not fit in memory.
        self._uses_numpy = any(not names_in(code).isdisjoint(_NUMPY) for code in self._codes)
        bit_larger: tuple[Disguise, ...] = (disguise_as_a_bit_larger,) if self._uses_numpy else ()
        self._all_larger = (*bit_larger, disguise_as_larger)
        # The groups of which the model takes other lengths.
        self.free_groups: list[Group] = []
        # For groups that the model takes at some other sizes only: the size to try.
        self._sizes: dict[Group, OtherSize] = {}
        self._ties = itertools.count(1)

    def test(
        self, inputs: list[torch.Tensor], earlier: Mapping[Dim, Outcome], *, other_mode: bool
    ) -> dict[Dim, Outcome]:
        """Return what is known of each dimension of the inputs.

        Those that the model refused in an `earlier` trace are tried all at once, and where it refuses that again, not
        alone. If that trace was one in the `other_mode`, first dimensions are: the number of samples may be refused in
        one mode alone, as by a batch norm that gets one sample in train mode. Where other sizes may not run for real,
        those that are likely to be free are tried once, all together.
        """
        self._inputs = inputs
        groups, likely = (divided(each, earlier) for each in groups_of(inputs))
        known = {group: NOT_ASKED for group in groups if not self._may_try(group)}
        groups, likely = ([group for group in each if group not in known] for each in (groups, likely))
        if self._trace.is_real and not self._request.tracer.runs_sizes_for_real:
            disguises = (*self._all_larger, disguise_as_zero)
            are_free = all(self._outcome_without_values(likely, disguise) == FREE for disguise in disguises)
            known.update({group: FREE if are_free and group in likely else NOT_ALONE for group in groups})
            return {dim: outcome for group, outcome in known.items() for dim in group.dims}
        refused = [group for group in groups if was_refused(group, earlier)]
        if refused and self._outcome(refused).is_refusal:
            fixed = [group for group in refused if group.position > 0 or not other_mode or len(refused) == 1]
            known.update({group: earlier[group.dims[0]] for group in fixed})
            likely = [group for group in likely if group not in refused]
        for together in self._tried_together(likely):
            outcome = self._outcome(together)
            if outcome == FREE:
                known.update(dict.fromkeys(together, FREE))
                break
            known.update(dict.fromkeys(filter(self._is_compared, together), outcome))
        for group in groups:
            if group not in known:
                known[group] = self._alone(group, group in likely)
            if known[group] != FREE and len(group.dims) > 1 and not was_refused(group, earlier):
                outcomes = self._apart(group, known.pop(group), group in likely, earlier)
                known.update(outcomes)
        self._try_together(known)
        self._try_multiples(known, earlier)
        free = [group for group, outcome in known.items() if outcome in (FREE, TOGETHER)]
        # What has been found to be free is lost without this run, whatever others have computed.
        if free and self._outcome(free, disguise=disguise_as_zero, is_limited=False) != FREE:
            known.update({group: self._if_small(group, known[group]) for group in free})
        if free and len(self._all_larger) > 1:
            known.update(dict.fromkeys(self._changed_where_larger(free), CHANGED))
        self._fix_bounds_of_slices(known)
        known.update({group: IF_TAKEN for group in self._sizes if known.get(group) == FREE})
        self.free_groups = [group for group, outcome in known.items() if outcome.is_free]
        return {dim: outcome for group, outcome in known.items() for dim in group.dims}

    def _changed_where_larger(self, free: list[Group]) -> list[Group]:
        """Return the groups for which the model does something else where C code sees numbers as much larger ones."""
        outcome = self._at_once(free, disguise_as_larger)
        if outcome == FREE:
            return []
        changed = [group for group in free if self._outcome([group], disguise_as_larger) != FREE]
        # What the model does not take together, whatever C code sees, says nothing of them.
        is_refused = outcome.is_refusal and self._at_once(free, self._all_larger[0]).is_refusal
        return changed if changed or is_refused else free

    def _at_once(self, groups: list[Group], disguise: Disguise) -> Outcome:
        """Try other lengths of all groups, and where the model refuses these, some that more models take together."""
        outcome = self._outcome(groups, disguise)
        if outcome.is_refusal:
            usual, self._sizes = self._sizes, {**dict.fromkeys(groups, twice), **self._sizes}
            outcome = self._outcome(groups, disguise)
            self._sizes = usual
        return outcome

    def _may_try(self, group: Group) -> bool:
        asked = self._request.tracer.check_sizes
        return asked == "full" or (asked == "batch" and group.position == 0)

    def _is_compared(self, group: Group) -> bool:
        return all(dim in self._compared for dim in group.dims)

    def _tried_together(self, likely: list[Group]) -> list[list[Group]]:
        """Return the groups that are tried at once, in order, until the model takes some."""
        tried = [likely]
        if self._trace.is_real:  # not each alone afterwards; the first dimension may have to be as on the example
            others = [group for group in likely if group.position > 0]
            tried += [others] if len(others) < len(likely) else []
        return [groups for groups in tried if len(groups) > 1]

    def _try_together(self, known: dict[Group, Outcome]) -> None:
        """Try refused dimensions of one length at once, wherever they are: nodes and their adjacency matrix, say.

        If that is refused too, those that were refused alike are: a number of channels may have that length by chance.
        """
        refused = [group for group, outcome in known.items() if self._may_be_free_together(group, outcome)]
        for size in dict.fromkeys(group.size for group in refused):
            groups = [group for group in refused if group.size == size]
            if self._note_if_free_together(groups, known):
                continue
            outcomes = dict.fromkeys(known[group] for group in groups)
            alike = [[group for group in groups if known[group] == outcome] for outcome in outcomes]
            for some in alike if len(alike) > 1 else []:
                self._note_if_free_together(some, known)

    def _note_if_free_together(self, groups: list[Group], known: dict[Group, Outcome]) -> bool:
        """Try groups of one length at once; if they are free, note that in `known`, and return True."""
        dims = tuple(sorted({dim for group in groups for dim in group.dims}))
        is_asserted = any(known[group].is_assertion for group in groups)
        if len({position for _, position in dims}) < 2 or (is_asserted and not self._may_be_matched(dims)):
            return False
        together = Group(min(group.position for group in groups), groups[0].size, dims)
        if self._outcome([together]) != FREE:
            return False
        # Where one alone had another length, the model has done something else, perhaps without an error. Or it has
        # raised one, perhaps after C code has compared them, of which the graph has no check.
        is_checked = self._matched >= set(dims)
        is_tied = any(
            known[group] in _DOES_OTHERWISE or (known[group].is_raised and not is_checked) for group in groups
        )
        for group in groups:
            del known[group]
        if is_tied:
            parts = self._parts_free_alone(together)
            known.update({part: replace(TOGETHER, tied=next(self._ties)) for part in parts})
        else:
            known[together] = TOGETHER
        return True

    def _may_be_matched(self, dims: tuple[Dim, ...]) -> bool:
        """Say whether assertions may want these lengths to be equal, rather than those of the model: an image size."""
        return len({tensor for tensor, _ in dims}) > 1 or not self._matched.isdisjoint(dims)

    def _parts_free_alone(self, together: Group) -> list[Group]:
        """Return two halves of a group, if the model takes another length of each: two sets of points of one length."""
        for parts in halves(together, self._inputs):
            if all(self._outcome([part]) == FREE for part in parts):
                return parts
        return [together]

    def _may_be_free_together(self, group: Group, outcome: Outcome) -> bool:
        if outcome in _DOES_OTHERWISE or outcome.is_assertion:
            return not self._is_compared(group)
        return outcome == NOT_ALONE or outcome.is_refusal

    def _apart(
        self, group: Group, outcome: Outcome, is_likely: bool, earlier: Mapping[Dim, Outcome]
    ) -> dict[Group, Outcome]:
        """Return the outcomes of dimensions of a group alone, whose lengths may be one by chance; or of them at once.

        If each is refused, they are tried at multiples together.
        """
        parts = [replace(group, dims=(each,)) for each in group.dims]
        apart = {part: self._alone(part, is_likely) for part in parts}
        if all(self._may_take_multiples(*each, earlier) for each in (*apart.items(), (group, outcome))):
            outcome = self._at_multiples(group, outcome)
        return {group: outcome} if outcome == FREE else apart

    def _try_multiples(self, known: dict[Group, Outcome], earlier: Mapping[Dim, Outcome]) -> None:
        for group, outcome in known.items():
            if self._may_take_multiples(group, outcome, earlier):
                known[group] = self._at_multiples(group, outcome)

    def _may_take_multiples(self, group: Group, outcome: Outcome, earlier: Mapping[Dim, Outcome]) -> bool:
        is_refused_now = outcome.is_refusal and not was_refused(group, earlier)
        return group.position == 0 and is_refused_now and not self._is_compared(group)

    def _at_multiples(self, group: Group, outcome: Outcome) -> Outcome:
        """Try multiples of the number of samples.

        They may be the frames of videos, `x.view(-1, 4, *x.shape[1:])`, or fill a queue, `assert self.size % n == 0`.
        """
        # What is asserted, or ends the run later on, may be that a power of two is a multiple.
        for factor in (3, 2) if outcome.is_assertion or outcome == BROKE_OFF else (3,):
            if self._free_if(group, outcome, lambda _, size, number, factor=factor: factor * size) == FREE:
                return FREE
        return outcome

    def _fix_bounds_of_slices(self, known: dict[Group, Outcome]) -> None:
        """Fix lengths between which C code takes something (`layers[a:b]`), perhaps nothing at those of the example.

        At the same lengths, the disguise alone makes no difference where no C code reads them.
        """
        if not any(map(has_computed_slices, self._codes)):
            return
        found = self._trace.numbers
        numbers = [plain_number(number) for number in (*found.values, *(number for number, _ in found.computed))]
        usual = self._sizes
        free = [group for group, outcome in known.items() if outcome.is_free]
        self._sizes = {**dict.fromkeys(free, twice), **usual}  # which more models take together
        outcome = functools.cache(lambda disguise, *groups: self._outcome([*groups], disguise))
        for disguise in disguises_in_reverse(numbers):
            if not free or outcome(disguise, *free) == outcome(disguise_as_larger, *free) == FREE:
                continue
            disguises = (disguise, disguise_as_larger, disguise_as_zero)
            read_by_c = [each for each in free if {outcome(shown, each) for shown in disguises} >= _DISAGREE]
            if not read_by_c and {outcome(shown, *free) for shown in disguises} >= _DISAGREE:
                read_by_c = free
            known.update(dict.fromkeys(read_by_c, CHANGED))
            free = [group for group in free if group not in read_by_c]
        self._sizes = usual

    def _leave_if_changed(self) -> None:
        # A call that has broken off may have left its replica in a state that no whole call leaves.
        if self.before is not None and not self.before.checks.states.are_as_at_the_start():
            self.before = None

    def _alone(self, group: Group, is_likely: bool) -> Outcome:
        if self._trace.is_real and group.position > 0 and self._runs_left == 0:
            outcomes = (self._outcome_without_values([group], disguise) for disguise in self._all_larger)
            return FREE if all(outcome == FREE for outcome in outcomes) else NOT_ALONE
        outcome = self._outcome([group])
        if group.position > 0 and outcome in (FREE, CHANGED):  # else it ended early
            self._runs_left = max(self._runs_left - 1, 0)
        if group.position == 0 or not outcome.is_refusal or self._is_compared(group):
            return outcome
        if is_likely and group.size > 1:
            # The example may be as long as the model takes: `assert n <= self.block_size`, a table of positions.
            outcome = self._free_if(group, outcome, lambda dim, size, number: max(size // 2, 1))
        if outcome.is_assertion and group.size % 2 and group.size > 1:
            # Networks with dilated convolutions: `assert (n - 1) % 8 == 0`.
            outcome = self._free_if(group, outcome, lambda dim, size, number: 2 * size - 1)
        if outcome != FREE and self._trace.model_context.converting:
            # `int(n ** 0.5)` as the side of a square: where that is what n must be, four times n is it too.
            outcome = self._free_if(group, outcome, lambda dim, size, number: 4 * size)
        return outcome

    def _if_small(self, group: Group, outcome: Outcome) -> Outcome:
        # C code answers `2.0 * n > 30` and `items[:n]`, perhaps otherwise for a small n.
        if self._outcome([group], disguise=disguise_as_zero, is_limited=group.position > 0) == FREE:
            return outcome
        is_free = self._outcome([group], disguise=disguise_as_one) == FREE
        return replace(NOT_EMPTY, tied=outcome.tied) if is_free else CHANGED

    def _free_if(self, group: Group, reason: Outcome, other: OtherSize) -> Outcome:
        self._sizes[group] = other
        if self._outcome([group]) == FREE:
            return FREE
        del self._sizes[group]
        return reason

    def _outcome(self, groups: list[Group], disguise: Disguise | None = None, *, is_limited: bool = True) -> Outcome:
        disguise = disguise or self._all_larger[0]
        if self._trace.is_real:
            outcome = self._outcome_without_values(groups, disguise)
            if outcome is not None and (outcome.is_free or self._is_large):
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
        if self._is_same(again):
            return FREE
        return CHANGED if again.early_stop_reason is None else BROKE_OFF

    def _is_same(self, again: ExampleTrace) -> bool:
        if not matches_needed_nodes(again, self._trace):
            return False
        join_measured(self._trace.graph, again.graph, self._trace.needed)
        return True

    def _outcome_without_values(self, groups: list[Group], disguise: Disguise) -> Outcome | None:
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
        return FREE if self._is_same(again) else CHANGED

    def _run(self, groups: list[Group], disguise: Disguise, *, has_values: bool) -> ExampleTrace:
        changes = self._changes(groups, other_size)
        for other in OTHER_SIZES_FOR_REAL if has_values else ():
            for_real = self._changes(groups, other)
            if not any(has_equal_products(tensor, for_real) for tensor in self._inputs):
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
            dim: self._sizes.get(group, usual)(group.position, group.size, number)
            for number, group in enumerate(groups)
            for dim in group.dims
        }


def _reason(groups: list[Group], changes: Mapping[Dim, int], disguise: Disguise) -> str:
    sizes = [f"{group.size} as {changes[group.dims[0]]} at {group.position}" for group in groups]
    shown = "" if disguise in (disguise_as_larger, disguise_as_a_bit_larger) else f", shown as {disguise.__name__}"
    return f"other sizes ({', '.join(sizes)}{shown})"


def join_measured(graph: Graph, other: Graph, count: int | None = None) -> None:
    """Let `graph` know what calls were seen to write, share and draw in the same graph of another trace. O(nodes).

    With `count`, only so many nodes are the same.
    """
    for node, twin in zip(first_nodes(graph, count), first_nodes(other, count), strict=True):
        if twin.meta.get("is_overwritten"):
            node.meta["is_overwritten"] = True
        if "unpacked_into" in node.meta and _takes_another_length_apart(node, twin):
            node.meta["may_give_another_number"] = True
        measured: MeasuredEffects | None = node.meta.get("effects")
        if measured is not None and measured != twin.meta["effects"]:
            node.meta["effects"] = measured.joined(twin.meta["effects"])


def measures_of(graph: Graph) -> list[Any]:
    """Return what was measured of the calls of a graph, in a form that compares. O(nodes)."""
    keys = ("effects", "is_overwritten", "may_give_another_number")
    return [tuple(map(node.meta.get, keys)) for node in graph.nodes]


def _takes_another_length_apart(node: Node, twin: Node) -> bool:
    """Say whether a call has taken a dimension apart that was of another length at other sizes.

    It gave as many parts there, and may give fewer or more for a third length: `x.chunk(4)` gives 3 of 9.
    """
    is_of_torch = name_of(node.target) in _GIVES_PARTS_BY_LENGTH and not node.meta.get("is_wrapped")
    if not is_of_torch or not node.all_input_nodes:
        return False
    whole, other = (each.all_input_nodes[0].meta.get("shape", ()) for each in (node, twin))
    part, _ = next(iter(node.meta["parts"].values()), ((), None))
    lengths = zip(whole, other, part, strict=False)
    # A part that is the whole may be the only one of any dimension.
    return any(size != now and (part == whole or size != taken) for size, now, taken in lengths)
