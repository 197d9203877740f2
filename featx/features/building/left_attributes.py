"""What one graph of a model would leave in attributes for another graph: a graph assigns no attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from featx.errors import SpecializationError
from featx.ir.graph import Graph
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.source.state_writes import tensors_at


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


def note_left(graph: Graph, attributes: frozenset[Attribute]) -> None:
    """Note in which attributes forward has left what it computed, in the call of which `graph` is."""
    graph.output_node().meta["left_attributes"] = attributes


def left_by(graph: Graph) -> frozenset[Attribute]:
    """Return what was noted; nothing for a graph that was made otherwise."""
    found: frozenset[Attribute] = graph.output_node().meta.get("left_attributes", frozenset())
    return found


def check_cases(graphs: Iterable[Graph], model: nn.Module) -> None:
    """Raise where the calls of some of these graphs leave a value in an attribute, and those of others do not.

    The others may read it. So it is with a tensor of the model that some read and that others, pruned, do not write.
    O(graphs * attributes).

    Raises:
        SpecializationError: there is such an attribute.
    """
    graphs = list(graphs)
    left = [left_by(graph) for graph in graphs]
    attribute = min(frozenset.union(*left) - frozenset.intersection(*left), default=None)
    if attribute is not None:
        raise SpecializationError(
            f"forward stores what it computes in {text_of(attribute)} for some inputs, and may read it "
            "in a later call for others, and a graph stores nothing there. To go on, write it into a buffer in place, "
            "or use an extractor of its own for each kind of input"
        )
    uses = list(map(state_use_of, graphs))
    if any(tensors_left_out(model, use, other) for use in uses for other in uses):
        raise SpecializationError(
            "for some inputs forward writes into a tensor of the model, such as a buffer, that no requested value is "
            "computed from, and for others one is. The graph for the first ones leaves that out, so that the tensor "
            "would be out of date. To go on, run the model itself on these inputs"
        )


def tensors_left_out(model: nn.Module, use: StateUse, other: StateUse) -> set[int]:
    """Return the ids of tensors that the one graph does not write, where forward does, and that the other one reads."""
    return tensors_at(model, use.left_out) & tensors_at(model, other.read) if use.left_out else set()


def text_of(attribute: Attribute) -> str:
    """Return how messages name an attribute of a module, or what lies in a file."""
    name = attribute[1]
    return f"the attribute '{'.'.join(filter(None, attribute))}'" if name.isidentifier() else name
