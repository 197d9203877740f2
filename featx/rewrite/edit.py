"""Put replacements into a graph in place of matches: copies first, then the readers, and the old nodes last."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from featx.ir.arguments import map_arg, nodes_in
from featx.ir.copying import ORIGIN
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.rewiring import keep_measured_effects, replace_inputs
from featx.rewrite.placing import point_anywhere, point_behind
from featx.rewrite.safety import Place
from featx.rewrite.site import Site

# What of `meta` describes the call that makes a value.
_OF_THE_CALL = frozenset({"effects", "is_guard"})
# What a tracer has seen of the whole graph: whether a value is written after it was made.
_OF_THE_GRAPH = "is_overwritten"


class Edit:
    """One rewriting of a graph.

    Readers of what matches return are changed when all matches have been replaced, each once: a node that reads a
    thousand of them is changed in O(its arguments), and not a thousand times. `may_move` says which nodes may stand
    anywhere that their inputs and readers allow.
    """

    def __init__(self, graph: Graph, may_move: Callable[[Node], bool]) -> None:
        self._graph = graph
        self._may_move = may_move
        # The new nodes of each match that was replaced.
        self.replaced: dict[Site, list[Node]] = {}
        # What the new nodes call and read in the module, and which modules the old ones called.
        self.targets: set[str] = set()
        self.called_before: dict[str, None] = {}
        self._values: dict[Node, Any] = {}
        self._gone: set[Node] = set()
        # The new nodes, and whether they may move.
        self._added: dict[Node, bool] = {}

    def replace(self, site: Site, place: Place) -> None:
        """Add the replacement of a match to the graph, if there is a point where it can go."""
        replacement = site.replacement
        values: dict[Node, Any] = {node: self._current(value) for node, value in site.inputs.items()}
        point = point_behind(site) if place is Place.BEHIND else self._find_point(site, values)
        if point is None:
            return
        added: list[Node] = []
        with self._graph.inserting_before(point):
            for node in replacement.nodes:
                values[node] = self._copy(node, values, site)
                added.append(values[node])
        self._added.update(dict.fromkeys(added, place is Place.ANYWHERE and replacement.is_pure))
        for node, value in site.outputs:
            self._values[node] = values[value] if isinstance(value, Node) else value
        _carry_meta(site, values)
        self._gone.update(site.nodes)
        self.replaced[site] = added

    def finish(self) -> None:
        """Let the readers of what was replaced read the new values, and erase the old nodes."""
        values = {node: self._current_node(node) for node in self._values}
        for reader in dict.fromkeys([user for node in values for user in node.users if user not in self._gone]):
            replace_inputs(reader, values)
        for node in sorted(self._gone, key=attrgetter("label"), reverse=True):
            if node.op == "call_module":
                self.called_before[node.target] = None
            self._graph.erase_node(node)
        if self.replaced:
            for node in self._graph.nodes:
                node.meta.pop(_OF_THE_GRAPH, None)
        for site in self.replaced:
            site.update_inputs(self._current)

    def _find_point(self, site: Site, values: dict[Node, Any]) -> Node | None:
        inputs = [node for placeholder in site.replacement.used for node in nodes_in(values[placeholder])]
        return point_anywhere(site, inputs, self._gone, self._is_movable, self._inputs_of)

    def _is_movable(self, node: Node) -> bool:
        return self._added[node] if node in self._added else self._may_move(node)

    def _inputs_of(self, node: Node) -> list[Node]:
        return nodes_in([self._current_node(source) for source in node.all_input_nodes])

    def _current(self, value: Any) -> Any:
        """Return what an argument will be when the rewriting is done, as far as is known."""
        return map_arg(value, self._current_node)

    def _current_node(self, node: Node) -> Any:
        values = self._values
        value = values.get(node, node)
        while isinstance(value, Node) and value in values:
            value = values[node] = values[value]
        return value if isinstance(value, Node) else self._current(value)

    def _copy(self, node: Node, values: dict[Node, Any], site: Site) -> Node:
        target = node.target
        if node.op in ("call_module", "get_attr"):
            target = site.paths[target]
            self.targets.add(target)
        lookup = values.__getitem__
        kwargs = map_arg(node.kwargs, lookup) if node.kwargs else None
        copy = self._graph.create_node(node.op, target, map_arg(node.args, lookup), kwargs, node.name, node.type)
        copy.meta = node.meta.copy()
        keep_measured_effects(copy, [values[source] for source in node.all_input_nodes])
        return copy


def _carry_meta(site: Site, values: dict[Node, Any]) -> None:
    replacement = site.replacement
    for node in replacement.nodes:
        meta, origin = values[node].meta, site.origin_of(node).meta
        meta.pop("qualified_name", None)  # of the replacement's own module
        for key in ORIGIN:
            if key in origin:
                meta[key] = origin[key]
            else:
                meta.pop(key, None)
        if node in replacement.returned:
            for key, value in origin.items():
                if key not in meta and key not in _OF_THE_CALL:
                    meta[key] = value
