"""What one graph of a model would leave in attributes for another graph: a graph assigns no attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from torch import nn

from featx.errors import SpecializationError
from featx.examples import Example
from featx.ir.graph import Graph
from featx.tracing.nodes.naming import CallSite
from featx.tracing.objects.module_parts import tensors_at
from featx.tracing.side_effects.left import Left


class Case(NamedTuple):
    """A graph of a model, and the inputs for which it was traced, if they are known; large ones have no values."""

    graph: Graph
    example: Example | None


class IsUnaffected(Protocol):
    """Says whether forward does the same with inputs, whether or not it had a call with other ones before."""

    def __call__(self, example: Example, earlier: Example, *, is_in_mode: bool, is_same_mode: bool) -> bool:
        """Say so for `example` after `earlier`.

        `is_in_mode`: in the mode of the new graph, and not in the other one. `is_same_mode`: the call before had the
        same mode.
        """
        ...


class StateUse(NamedTuple):
    """The paths of tensors and modules of a model that a graph reads, and that it does not write where forward does."""

    read: frozenset[str]
    left_out: frozenset[str]


def note_state(graph: Graph, use: StateUse) -> None:
    """Note what a pruned graph does with tensors of the model."""
    graph.output_node().meta["state_use"] = use


def state_use_of(graph: Graph) -> StateUse:
    """Return what was noted; nothing for a graph that was made otherwise."""
    found: StateUse = graph.output_node().meta.get("state_use", StateUse(frozenset(), frozenset()))
    return found


def note_left(graph: Graph, left: frozenset[Left]) -> None:
    """Note where forward has left what it computed, in the call of which `graph` is."""
    graph.output_node().meta["left_attributes"] = left


def left_by(graph: Graph) -> frozenset[Left]:
    """Return what was noted; nothing for a graph that was made otherwise."""
    found: frozenset[Left] = graph.output_node().meta.get("left_attributes", frozenset())
    return found


def note_call_sites(graph: Graph, sites: Mapping[str, CallSite]) -> None:
    """Note which calls in the code of the model the requested and edited operations are, by their names."""
    graph.output_node().meta["call_sites"] = sites


def call_sites_of(graph: Graph) -> Mapping[str, CallSite]:
    """Return what was noted; nothing for a graph that was made otherwise."""
    found: Mapping[str, CallSite] = graph.output_node().meta.get("call_sites", {})
    return found


def leave_the_same(one: Graph, other: Graph) -> bool:
    """Say whether calls of two graphs leave the same on the model, and use the same of it."""
    return left_by(one) == left_by(other) and state_use_of(one) == state_use_of(other)


def check_case(
    new: Case, known: Iterable[Case], in_other_mode: Iterable[Case], model: nn.Module, is_unaffected: IsUnaffected
) -> None:
    """Raise where a call of one of these graphs leaves a value in an attribute that changes what another one is for.

    So it is with a tensor of the model that some read and that others, pruned, do not write. O(cases * attributes),
    and some runs of the model for each graph that leaves other attributes than `new`.

    Args:
        new: a graph, and the inputs for which it was traced.
        known: those there were before in the same one of train and eval mode.
        in_other_mode: those for the other mode.
        model: what is traced.
        is_unaffected: see there.

    Raises:
        SpecializationError: there is such an attribute.
    """
    known, others = list(known), list(in_other_mode)
    is_of_pairs = _leave_the_same_attributes([left_by(each.graph) for each in (*known, *others, new)])
    pairs = [(new, each, True) for each in (*known, *others)] + [(each, new, False) for each in (*known, *others)]
    for case, earlier, is_new in pairs:
        left = left_by(earlier.graph) - left_by(case.graph)
        is_same_mode = not any(each is (earlier if is_new else case) for each in others)
        ask = functools.partial(is_unaffected, is_in_mode=is_new or is_same_mode, is_same_mode=is_same_mode)
        if left and not (is_of_pairs and _is_unaffected(case, earlier, left, ask)):
            raise SpecializationError(
                f"forward stores what it computes in {min(left)} for some inputs, or in one mode, and reads "
                "it in a later call for others, or may do so, and a graph stores nothing there. To go on, write it "
                "into a buffer in place, or use an extractor of its own for each kind of input"
            )
        if tensors_left_out(model, state_use_of(earlier.graph), state_use_of(case.graph)):
            raise SpecializationError(
                "for some inputs forward writes into a tensor of the model, such as a buffer, that no requested value "
                "is computed from, and for others, or in the other mode, one is. The graph for the first ones leaves "
                "that out, so that the tensor would be out of date. To go on, run the model itself on these inputs, or "
                "make the extractor with an example like them"
            )


def _leave_the_same_attributes(left_by_each: list[frozenset[Left]]) -> bool:
    """Say whether all calls that leave something, besides what all of them leave, leave it in the same attributes.

    Then the last such call alone tells what the state is. Else each of two may change nothing for a third one, and both
    together something.
    """
    common = frozenset.intersection(*left_by_each)
    places = {frozenset(each.attribute for each in left - common) for left in left_by_each}
    return len(places - {frozenset()}) == 1


def _is_unaffected(case: Case, earlier: Case, left: Iterable[Left], ask: Callable[[Example, Example], bool]) -> bool:
    # With an old value out of a cache the graph is the same.
    if case.example is None or earlier.example is None or any(each.is_for_one_length for each in left):
        return False
    return ask(case.example, earlier.example)


def tensors_left_out(model: nn.Module, use: StateUse, other: StateUse) -> set[int]:
    """Return the ids of tensors that the one graph does not write, where forward does, and that the other one reads."""
    return tensors_at(model, use.left_out) & tensors_at(model, other.read) if use.left_out else set()
