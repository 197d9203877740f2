"""Variation: find which dimensions of the inputs leave the graph as it is, by runs at other sizes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Set
from dataclasses import replace

import torch

from featx.tracing.example.trace import ExampleTrace
from featx.tracing.example.trace_request import TraceRequest
from featx.tracing.guards.disguises import (
    disguise_as_larger,
    disguise_as_one,
    disguise_as_zero,
    disguises_in_reverse,
)
from featx.tracing.guards.scalars import plain_number
from featx.tracing.sizes.groups import Group, divided, groups_of, halves, was_refused
from featx.tracing.sizes.outcomes import (
    BROKE_OFF,
    CHANGED,
    FREE,
    IF_TAKEN,
    NOT_ALONE,
    NOT_ASKED,
    NOT_EMPTY,
    TOGETHER,
    Outcome,
)
from featx.tracing.sizes.resizing import Dim, OtherSize, twice
from featx.tracing.sizes.size_runs import SizeRuns
from featx.tracing.source_uses.slices import has_computed_slices

_RUNS_ALONE = 3
_DISAGREE = {FREE, CHANGED}
_DOES_OTHERWISE = {CHANGED, BROKE_OFF}


class Variation:
    """Decides which sizes to try, alone and together, and what the outcomes say of each dimension.

    Args:
        request: what is traced, on the example.
        trace: the trace at the size of the example.
        compared: the dimensions that the model compares with a number: they are fixed.
        matched: the dimensions of which the graph checks that they match others.
        before: as for `SizeRuns`.

    Attributes:
        runs: the runs at other sizes.
        free_groups: the groups of dimensions of which the model takes other lengths.
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
        self.runs = SizeRuns(request, trace, before=before)
        self._request = request
        self._trace = trace
        self._compared = compared
        self._matched = matched
        # How many more whole runs for real may try one dimension that is not the first.
        self._runs_left = 0 if trace.is_large else _RUNS_ALONE
        self.free_groups: list[Group] = []
        # The dimensions that are tried at once first, since they have one position and one length.
        self._at_once: list[frozenset[Dim]] = []
        self._ties = itertools.count(1)

    def test(
        self, inputs: list[torch.Tensor], earlier: Mapping[Dim, Outcome], *, other_mode: bool
    ) -> dict[Dim, Outcome]:
        """Return what is known of each dimension of the inputs.

        Those that the model refused in an `earlier` trace are tried all at once, and those for which it raises the
        same error again are not tried alone. If that trace was one in the `other_mode`, first dimensions are: the
        number of samples may be refused in one mode alone, as by a batch norm that gets one sample in train mode.
        Where other sizes may not run for real, those that are likely to be free are tried once, all together.
        """
        self.runs.inputs = inputs
        groups, likely = (divided(each, earlier) for each in groups_of(inputs))
        self._at_once = [frozenset(group.dims) for group in groups]
        known = {group: NOT_ASKED for group in groups if not self._may_try(group)}
        groups, likely = ([group for group in each if group not in known] for each in (groups, likely))
        if self._trace.is_real and not self._request.tracer.runs_sizes_for_real:
            disguises = (*self.runs.all_larger, disguise_as_zero)
            are_free = all(self.runs.outcome_without_values(likely, disguise) == FREE for disguise in disguises)
            known.update({group: FREE if are_free and group in likely else NOT_ALONE for group in groups})
            return {dim: outcome for group, outcome in known.items() for dim in group.dims}
        refused = self._refused_again([group for group in groups if was_refused(group, earlier)], earlier)
        if refused:
            fixed = [group for group in refused if group.position > 0 or not other_mode or len(refused) == 1]
            known.update({group: earlier[group.dims[0]] for group in fixed})
            likely = [group for group in likely if group not in refused]
        for together in self._tried_together(likely):
            outcome = self.runs.outcome(together)
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
        if free and self.runs.outcome(free, disguise=disguise_as_zero, is_limited=False) != FREE:
            known.update({group: self._if_small(group, known[group]) for group in free})
        if free and len(self.runs.all_larger) > 1:
            known.update(dict.fromkeys(self._changed_where_larger(free), CHANGED))
        self._fix_bounds_of_slices(known)
        known.update({group: IF_TAKEN for group in self.runs.sizes if known.get(group) == FREE})
        self.free_groups = [group for group, outcome in known.items() if outcome.is_free]
        return {dim: outcome for group, outcome in known.items() for dim in group.dims}

    def _refused_again(self, groups: list[Group], earlier: Mapping[Dim, Outcome]) -> list[Group]:
        """Return those of the groups, which were refused, that are refused again for the same reason; see `test`."""
        again: list[Group] = []
        while groups and (outcome := self.runs.outcome(groups)).is_refusal:
            alike = [group for group in groups if outcome.may_be(earlier[group.dims[0]])]
            if not alike:
                break
            again += alike
            groups = [group for group in groups if group not in alike]
        return again

    def _changed_where_larger(self, free: list[Group]) -> list[Group]:
        """Return the groups for which the model does something else where C code sees numbers as much larger ones."""
        outcome = self.runs.outcome_at_once(free, disguise_as_larger)
        if outcome == FREE:
            return []
        changed = [group for group in free if self.runs.outcome([group], disguise_as_larger) != FREE]
        # What the model does not take together, whatever C code sees, says nothing of them.
        is_refused = outcome.is_refusal and self.runs.outcome_at_once(free, self.runs.all_larger[0]).is_refusal
        return changed if changed or is_refused else free

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
        # The keys and values of a cache may have the length of another input.
        is_part = len(groups) > 1 and any(each.issuperset(dims) and len(each) > len(dims) for each in self._at_once)
        is_known = len({position for _, position in dims}) < 2 and not is_part
        if is_known or (is_asserted and not self._may_be_matched(dims)):
            return False
        together = Group(min(group.position for group in groups), groups[0].size, dims)
        if self.runs.outcome([together]) != FREE:
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
        for parts in halves(together, self.runs.inputs):
            if all(self.runs.outcome([part]) == FREE for part in parts):
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
        if not any(map(has_computed_slices, self.runs.codes)):
            return
        found = self._trace.numbers
        numbers = [plain_number(number) for number in (*found.values, *(number for number, _ in found.computed))]
        usual = self.runs.sizes
        free = [group for group, outcome in known.items() if outcome.is_free]
        self.runs.sizes = {**dict.fromkeys(free, twice), **usual}  # which more models take together
        outcome = functools.cache(lambda disguise, *groups: self.runs.outcome([*groups], disguise))
        for disguise in disguises_in_reverse(numbers):
            if not free or outcome(disguise, *free) == outcome(disguise_as_larger, *free) == FREE:
                continue
            disguises = (disguise, disguise_as_larger, disguise_as_zero)
            read_by_c = [each for each in free if {outcome(shown, each) for shown in disguises} >= _DISAGREE]
            if not read_by_c and {outcome(shown, *free) for shown in disguises} >= _DISAGREE:
                read_by_c = free
            known.update(dict.fromkeys(read_by_c, CHANGED))
            free = [group for group in free if group not in read_by_c]
        self.runs.sizes = usual

    def _alone(self, group: Group, is_likely: bool) -> Outcome:
        if self._trace.is_real and group.position > 0 and self._runs_left == 0:
            outcomes = (self.runs.outcome_without_values([group], disguise) for disguise in self.runs.all_larger)
            return FREE if all(outcome == FREE for outcome in outcomes) else NOT_ALONE
        outcome = self.runs.outcome([group])
        may_be_free_below = self.runs.has_decided_otherwise and not self._trace.is_real and not self._is_compared(group)
        if may_be_free_below and is_likely and group.position > 0 and group.size > 1:
            # `if height * width > 4000:`, of which the graph has a check.
            return self._free_if(group, outcome, lambda dim, size, number: size // 2)
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
        if self.runs.outcome([group], disguise=disguise_as_zero, is_limited=group.position > 0) == FREE:
            return outcome
        is_free = self.runs.outcome([group], disguise=disguise_as_one) == FREE
        return replace(NOT_EMPTY, tied=outcome.tied) if is_free else CHANGED

    def _free_if(self, group: Group, reason: Outcome, other: OtherSize) -> Outcome:
        self.runs.sizes[group] = other
        if self.runs.outcome([group]) == FREE:
            return FREE
        del self.runs.sizes[group]
        return reason
