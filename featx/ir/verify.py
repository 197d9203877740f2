"""Check that a graph can be turned into code that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from featx.errors import ArgumentTypeError, FeatxError, ForeignNodeError, GraphError, OpcodeError, TargetError
from featx.ir.identifiers import expected_target, is_legal_target
from featx.ir.node import is_well_formed
from featx.ir.opcodes import LEGAL_OPS

if TYPE_CHECKING:
    from featx.ir.graph import Graph
    from featx.ir.node import Node


def verify(graph: Graph, root: object | None) -> None:
    """Raise where `graph` is malformed: the first fault, by node name.

    Checked are opcodes, names (each once), arguments (nodes of this graph, computed before they are read, which also
    rules out cycles), users (each edge known on both ends) and, where `root` is given, that every `call_module` and
    `get_attr` target exists in it. O(nodes + edges).

    Raises:
        GraphError: the graph is malformed; ForeignNodeError and TargetError are its special cases.
    """
    if not is_well_formed(graph.root, graph):
        raise _first_error(graph)
    if root is not None:
        verify_targets(graph, root)


def verify_targets(graph: Graph, root: object) -> None:
    """Raise TargetError at the first `call_module` or `get_attr` target that `root` does not have."""
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            value = find_attribute(root, node.target, node)
            if node.op == "call_module" and not callable(value):
                raise TargetError(
                    f"node '{node.name}' calls '{node.target}' of {_class_of(root)}, which is a "
                    f"{type(value).__name__} and not a module; use a get_attr node to read it"
                )


def find_attribute(
    root: object, path: str, node: Node | None = None
) -> Any:  # Any: a module, parameter, buffer or attribute
    """Return the attribute of `root` at a dotted path.

    Raises:
        TargetError: there is none; the message names `node`, if given, and the part of the path that is missing.
    """
    value = root
    for part in path.split("."):
        found = _attribute(value, part)
        if found is None and not hasattr(value, part):
            who = "the graph" if node is None else f"node '{node.name}' ({node.op})"
            raise TargetError(
                f"{who} refers to '{path}', but {_class_of(root)} has no such attribute: "
                f"'{part}' is missing in {_class_of(value)}. Add it to the module, or change node.target."
            )
        value = found
    return value


def _attribute(value: object, name: str) -> Any:
    # Where nn.Module registers things, asked directly: it is faster, and a trace that runs around this does not notice.
    for registry in ("_modules", "_parameters", "_buffers"):
        found = getattr(value, "__dict__", {}).get(registry, {}).get(name)
        if found is not None:
            return found
    return getattr(value, name, None)


def _class_of(value: object) -> str:
    name = getattr(value, "_get_name", None)
    return str(name()) if callable(name) else type(value).__name__


def _first_error(graph: Graph) -> FeatxError:
    seen: set[Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        error = _node_error(node, graph)
        if error is not None:
            return error
        if node.name in names:
            return GraphError(f"two nodes are named '{node.name}'; rename one of them")
        for source in node.all_input_nodes:
            if source not in seen:
                return _unseen_input_error(node, source, graph)
            if node not in source.users:
                return GraphError(f"node '{node.name}' reads '{source.name}' but is not among its users")
        seen.add(node)
        names.add(node.name)
    for node in graph.nodes:
        for user in node.users:
            if user not in seen or node not in user.all_input_nodes:
                return GraphError(f"node '{node.name}' lists '{user.name}' as a user, which does not read it")
    raise AssertionError("unreachable: a malformed graph has a first fault")


def _node_error(node: Node, graph: Graph) -> FeatxError | None:
    if node.op not in LEGAL_OPS:
        return OpcodeError(f"node '{node.name}' has the unknown opcode {node.op!r}")
    if node.graph is not graph:
        return ForeignNodeError(f"node '{node.name}' stands in a graph that it does not belong to")
    if callable(node.target) == (node.op == "call_function") and is_legal_target(node.op, node.target):
        return None
    expected = expected_target(node.op, node.target)
    return ArgumentTypeError(f"the target of {node.op} node '{node.name}' must be {expected}, got {node.target!r}")


def _unseen_input_error(node: Node, source: Node, graph: Graph) -> GraphError:
    if source.graph is not graph:
        return ForeignNodeError(
            f"node '{node.name}' reads '{source.name}', which belongs to another graph; "
            "when copying nodes between graphs, map their inputs with node_copy's arg_transform"
        )
    if source.is_erased:
        return ForeignNodeError(f"node '{node.name}' reads '{source.name}', which was erased")
    return GraphError(
        f"node '{node.name}' reads '{source.name}' before it is computed; "
        "move one of them with node.prepend or node.append so that inputs come first"
    )
