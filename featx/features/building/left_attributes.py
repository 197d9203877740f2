"""What one graph of a model would leave in attributes for another graph: a graph assigns no attributes."""

from __future__ import annotations

from collections.abc import Iterable

from featx.errors import SpecializationError
from featx.ir.graph import Graph
from featx.tracing.side_effects.state_checks import Attribute


def note_left(graph: Graph, attributes: frozenset[Attribute]) -> None:
    """Note in which attributes forward has left what it computed, in the call of which `graph` is."""
    graph.output_node().meta["left_attributes"] = attributes


def left_by(graph: Graph) -> frozenset[Attribute]:
    """Return what was noted; nothing for a graph that was made otherwise."""
    found: frozenset[Attribute] = graph.output_node().meta.get("left_attributes", frozenset())
    return found


def check_cases(graphs: Iterable[Graph]) -> None:
    """Raise where the calls of some of these graphs leave a value in an attribute, and those of others do not.

    The others may read it. O(graphs * attributes).

    Raises:
        SpecializationError: there is such an attribute.
    """
    left = [left_by(graph) for graph in graphs]
    attribute = min(frozenset.union(*left) - frozenset.intersection(*left), default=None)
    if attribute is not None:
        raise SpecializationError(
            f"forward stores what it computes in {text_of(attribute)} for some inputs, and may read it "
            "in a later call for others, and a graph stores nothing there. To go on, write it into a buffer in place, "
            "or use an extractor of its own for each kind of input"
        )


def text_of(attribute: Attribute) -> str:
    """Return how messages name an attribute of a module, or what lies in a file."""
    name = attribute[1]
    return f"the attribute '{'.'.join(filter(None, attribute))}'" if name.isidentifier() else name
