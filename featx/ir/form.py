"""Which nodes ask for the form of a value, its shape or dtype say, and need none of its values."""

from __future__ import annotations

from featx.ir.arguments import nodes_in
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.operator_facts import facts_of, facts_of_call, first_argument

FORM_ATTRIBUTES = frozenset(
    "shape ndim dtype device layout itemsize nbytes is_cuda is_cpu is_meta is_sparse is_quantized".split()
)


def reads_form(node: Node) -> bool:
    """Say whether a node gives the form of a value: `x.size()`, `x.shape`."""
    if node.op == "call_method":
        return facts_of(node.target).reads_form
    return node.target is getattr and node.args[1] in FORM_ATTRIBUTES


def computes_form(node: Node) -> bool:
    """Say whether a node gives the form of a value, or is arithmetic of Python as on such numbers."""
    if reads_form(node):
        return True
    is_function = node.op == "call_function"
    return is_function and (node.target is len or getattr(node.target, "__module__", None) == "_operator")


def sources_of_values(node: Node) -> list[Node]:
    """Return the nodes of whose values a node makes use: `mean.type_as(x)` asks x for its dtype alone."""
    if reads_form(node):
        return []
    facts = facts_of_call(node)
    if not facts.needs_form_of_first and not facts.needs_form_of_others:
        return list(node.all_input_nodes)
    first = first_argument(node.args, node.kwargs)
    if facts.needs_form_of_others:
        return nodes_in(first)
    # The first argument may be another one too: `x.new_tensor(x)`.
    named = {name: value for name, value in node.kwargs.items() if node.args or value is not first}
    return nodes_in((node.args[1:], named))


def computed_from_inputs(graph: Graph) -> set[Node]:
    """Return the nodes whose values, not their shapes alone, are computed from the inputs of a graph. O(nodes)."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not found.isdisjoint(sources_of_values(node)):
            found.add(node)
    return found
