"""Copy and pickle graphs node by node, so that a long graph does not recurse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from featx.ir.arguments import ATOMS, collect_nodes, map_arg
from featx.ir.names import qualified_name, resolve
from featx.ir.node import Node
from featx.rebuilding import with_items

if TYPE_CHECKING:
    from featx.ir.graph import Graph

# What of `meta` says where in the model a value comes from, which is true of what is made in the place of a node too.
ORIGIN = ("nn_module_stack", "source", "stack_trace")


class _Position:
    """Stands for a node in pickled arguments: the node at this index of the graph."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return _Position, (self.index,)


class _ByName:
    """Pickles a function of torch by its name; not all of them know their own (`F.max_pool2d`, `torch.ops`)."""

    __slots__ = ("function", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.function = resolve(name)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Any:
        """Return a stand-in for `function` if its name leads back to it, else the function itself."""
        name = qualified_name(function)
        return cls(name) if name.startswith("torch.") and resolve(name) is function else function

    def __reduce__(self) -> tuple[Any, ...]:
        return _ByName, (self.name,)


class _Copies:
    """The copies of the nodes of a graph, and of the literals in their arguments."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.nodes: dict[Node, Node] = {}
        self._memo = memo

    def of(self, value: Any) -> Any:
        """Return the copy of an argument."""
        kind = type(value)
        if kind is Node:
            return self.nodes[value]
        if kind in ATOMS:
            return value
        if kind is tuple:
            return tuple([self.of(item) for item in value])
        # Nodes are copies by then, which a deepcopy leaves as they are because they are not in `memo`.
        return copy.deepcopy(map_arg(value, self.nodes.__getitem__), self._memo)


def deepcopy_graph(graph: Graph, memo: dict[int, Any]) -> Graph:
    """Return an independent copy. Literals in arguments are copied with `memo`, targets and `meta` values are not."""
    duplicate = type(graph)(tracer_cls=graph.tracer_cls, tracer_extras=graph.tracer_extras)
    memo[id(graph)] = duplicate
    copies = _Copies(memo)
    for node in graph.nodes:
        args = tuple([copies.of(value) for value in node.args])
        kwargs = {key: copies.of(value) for key, value in node.kwargs.items()} if node.kwargs else {}
        twin = duplicate.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        twin.name = node.name
        copies.nodes[node] = memo[id(node)] = twin
    for node, twin in copies.nodes.items():
        twin.meta = _map_nodes(node.meta, copies.nodes.__getitem__)
    duplicate.code_transformer = graph.code_transformer
    return duplicate


def reduce_graph(graph: Graph) -> tuple[Any, ...]:
    """Return what `rebuild_graph` needs: plain rows, in which positions stand for nodes."""
    positions = {node: _Position(index) for index, node in enumerate(graph.nodes)}

    def to_position(node: Node) -> _Position:
        return positions[node]

    rows = [
        (
            node.op,
            node.target if isinstance(node.target, str) else _ByName.of(node.target),
            map_arg(node.args, to_position),
            map_arg(node.kwargs, to_position),
            node.name,
            node.type,
            _map_nodes(node.meta, to_position),
        )
        for node in graph.nodes
    ]
    return type(graph), graph.tracer_cls, graph.tracer_extras, graph.code_transformer, rows


def rebuild_graph(
    kind: type[Graph],
    tracer_cls: type[Any] | None,
    tracer_extras: dict[str, Any] | None,
    code_transformer: Any,
    rows: Iterable[tuple[Any, ...]],
) -> Graph:
    """Build the graph that `reduce_graph` took apart."""
    graph = kind(tracer_cls=tracer_cls, tracer_extras=tracer_extras)
    graph.code_transformer = code_transformer
    nodes: list[Node] = []
    metas: list[dict[str, Any]] = []
    for op, target, args, kwargs, name, annotation, meta in rows:
        function = target.function if isinstance(target, _ByName) else target
        args, kwargs = _from_positions(args, nodes), _from_positions(kwargs, nodes)
        node = graph.create_node(op, function, args, kwargs, name, annotation)
        node.name = name
        nodes.append(node)
        metas.append(meta)
    for node, meta in zip(nodes, metas, strict=True):
        node.meta = {key: _from_positions(value, nodes) for key, value in meta.items()}
    return graph


def _map_nodes(meta: dict[str, Any], function: Callable[[Node], Any]) -> dict[str, Any]:
    # A value without nodes stays the object that it is.
    mapped: dict[str, Any] = {}
    for key, value in meta.items():
        found: dict[Node, None] = {}
        collect_nodes(value, found)
        mapped[key] = map_arg(value, function) if found else value
    return mapped


def _from_positions(value: Any, nodes: list[Node]) -> Any:
    if isinstance(value, _Position):
        return nodes[value.index]
    if isinstance(value, (tuple, list)):
        sequence = cast(tuple[Any, ...], value)
        items = [_from_positions(item, nodes) for item in sequence]
        is_same = all(one is other for one, other in zip(items, sequence, strict=True))
        return sequence if is_same else with_items(sequence, items)
    if isinstance(value, dict):
        mapping = cast(dict[Any, Any], value)
        changed = {key: _from_positions(item, nodes) for key, item in mapping.items()}
        return mapping if all(changed[key] is mapping[key] for key in mapping) else changed
    if isinstance(value, slice):
        return slice(*(_from_positions(item, nodes) for item in (value.start, value.stop, value.step)))
    return value
