"""Find the dimensions of inputs of which the model compares the lengths: with numbers of its own, or with others."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from featx.ir.ancestors import with_ancestors
from featx.ir.equality import first_nodes
from featx.ir.form import reads_form, sources_of_values
from featx.ir.node import Node
from featx.tracing.example.trace import ExampleTrace
from featx.tracing.guards.guards import check_decision

# The questions whether two numbers are equal, with the answers which say that they are.
_ARE_EQUAL = ((operator.eq, True), (operator.ne, False))


def compared_dims(trace: ExampleTrace) -> Iterator[tuple[Node, int]]:
    """Yield inputs and dimensions whose length was equal to a number, and has to be again: `assert h == 224`.

    Dimensions may be counted from the end. O(nodes).
    """
    for check in first_nodes(trace.graph, trace.needed):
        if check.target is not check_decision or check.args[1] is not True:
            continue
        question = check.args[0]
        if isinstance(question, Node) and question.target is operator.eq:
            size, number = question.args if isinstance(question.args[0], Node) else reversed(question.args)
            found = _dimension(size) if isinstance(size, Node) and type(number) is int else None
            if found is not None:
                yield found


def matched_dims(trace: ExampleTrace) -> Iterator[tuple[Node, int]]:
    """Yield inputs and dimensions whose lengths had to match those of others: `assert x.shape[1] == y.shape[2]`.

    The graph checks that they match, or that what is computed from them does. Dimensions may be counted from the end.
    """
    for check in first_nodes(trace.graph, trace.needed):
        question = check.args[0] if check.target is check_decision else None
        if not isinstance(question, Node) or (question.target, check.args[1]) not in _ARE_EQUAL:
            continue
        if all(isinstance(side, Node) for side in question.args):
            yield from filter(None, map(_dimension, with_ancestors([question], sources_of_values)))


def _dimension(size: Node) -> tuple[Node, int] | None:
    """Return which dimension of which input a node is the length of: `x.shape[2]`, `x.size(2)`."""
    if size.target is operator.getitem:
        shape, dim = size.args
    else:
        shape, dim = size, size.args[1] if len(size.args) == 2 else None
    if not isinstance(shape, Node) or not reads_form(shape) or shape.target not in (getattr, "size"):
        return None
    source = shape.args[0]
    is_shape = shape.target == "size" or shape.args[1] == "shape"
    return (source, dim) if is_shape and isinstance(source, Node) and type(dim) is int else None
