"""Generate the code of a graph of torch.fx, and refuse it where it is not what the graph says."""

from __future__ import annotations

import torch.fx

from featx.errors import ArgumentTypeError, FeatxError, GraphError
from featx.interop.generated import hidden_name


def check_code(graph: torch.fx.Graph, owner: torch.fx.GraphModule | None) -> None:
    """Generate the code of `graph`, and raise where it is not what the graph says.

    `owner`, if there is one, gets the graph and runs that code. O(nodes + edges).

    Raises:
        ArgumentTypeError: a node cannot be written.
        GraphError: the whole cannot be, or an input has the name of what the code calls.
    """
    try:
        if owner is not None:
            owner.graph = graph
            source = owner.code
        else:
            source = graph.python_code("self").src
            compile(source, "<torch.fx>", "exec")
    except Exception as error:  # whatever comes of reprs, names and annotations
        raise _explained(graph, error) from error
    names = {node.target.lstrip("*"): node.name for node in graph.find_nodes(op="placeholder")}
    hidden = hidden_name(source, names)
    if hidden is not None:
        raise GraphError(
            f"input '{hidden}' (node '{names[hidden]}') hides what torch.fx's code calls by that name; "
            "rename the input: node.target"
        )


def _explained(graph: torch.fx.Graph, error: Exception) -> FeatxError:
    for node in graph.nodes:
        alone = torch.fx.Graph()
        inputs = {source: alone.placeholder(f"input_{source.name}") for source in node.all_input_nodes}
        try:
            copy = alone.node_copy(node, inputs.__getitem__)
            if copy.op != "output":
                alone.output(None)  # of inputs alone torch.fx makes no code that Python takes
            compile(alone.python_code("self").src, "<torch.fx>", "exec")
        except Exception as reason:
            return ArgumentTypeError(
                f"torch.fx cannot write the code of node '{node.name}' ({node.op} {node.target}): {reason}; "
                "change its target, its arguments or its type"
            )
    return GraphError(f"torch.fx cannot write the code of this graph: {error}; run it with featx, or change it")
