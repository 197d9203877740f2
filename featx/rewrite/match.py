"""SubgraphMatcher: find each place of a graph that looks like a pattern."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, cast

from torch import nn

from featx.errors import PatternError
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.rewrite.pattern import Pattern, Source, graph_of, without_guards
from featx.rewrite.search import Search
from featx.rewrite.targets import AlsoNamed, MatchModules, tests_of


@dataclasses.dataclass(slots=True)
class InternalMatch:
    """One match of a pattern in a graph.

    `anchors` are the nodes of the pattern from which it was followed; `nodes_map` maps the nodes of the pattern to
    those of the graph (an input may stand for a constant, a list or a tuple as well). `placeholder_nodes` and
    `returning_nodes` are what the inputs and outputs of the pattern were matched to, in its order. `name_node_map` is
    filled by `SubgraphMatcherWithNameNodeMap`.
    """

    anchors: list[Node]
    # Any: an input of the pattern may stand for a constant.
    nodes_map: dict[Node, Any] = dataclasses.field(default_factory=dict[Node, Any])
    placeholder_nodes: list[Any] = dataclasses.field(default_factory=list[Any])
    returning_nodes: list[Node] = dataclasses.field(default_factory=list[Node])
    name_node_map: dict[str, Node] = dataclasses.field(default_factory=dict[str, Node])


class SubgraphMatcher:
    """Finds the places of a graph that look like a pattern.

    A match is a set of nodes that do what the pattern does: the same operations and constants, wired alike. Only the
    match itself reads its inner values; what the pattern returns, others may read. Inputs of the pattern stand for any
    node or constant; two inputs never stand for one node, as in torch.fx. Arguments passed by position match those
    passed by name. `ANY` and `AnyOf` of `featx.rewrite` stand for any constant, and for one of several operations.

    Args:
        pattern: a graph, or what is traced to get one.
        match_output: whether the output of the pattern must be the output of the graph.
        match_placeholder: whether the inputs of the pattern must be inputs of the graph.
        remove_overlapping_matches: whether a match that shares a node with an earlier one is left out.
        ignore_literals: whether constants of the pattern match any value.
        match_modules: which modules match those that the pattern calls. `"path"`, as in torch.fx: those at the same
            path. `"type"`: those of the same class. `"config"`: those of the same class that differ in nothing but the
            values of their tensors (see `has_same_settings`); tensors that the pattern reads match those of the same
            shape and dtype then, and otherwise, as in torch.fx, those of the same class.
        commutative: whether the operands of sums, products and the like may be exchanged.

    Raises:
        PatternError: the pattern computes nothing, or has inputs or nodes that its outputs do not depend on.
        TraceError: the pattern cannot be traced.
        ArgumentTypeError: the pattern is nothing that has a graph, or an option has no such value.
    """

    def __init__(
        self,
        pattern: Source,
        match_output: bool = False,
        match_placeholder: bool = False,
        remove_overlapping_matches: bool = True,
        ignore_literals: bool = False,
        *,
        match_modules: MatchModules = "path",
        commutative: bool = False,
    ) -> None:
        graph, root = graph_of(pattern, "pattern")
        graph = without_guards(graph)
        self._plan = Pattern(graph, root, match_output=match_output)
        self.pattern = graph
        self.match_output = match_output
        self.match_placeholder = match_placeholder
        self.remove_overlapping_matches = remove_overlapping_matches
        self.ignore_literals = ignore_literals
        self.match_modules: MatchModules = match_modules
        self.commutative = commutative
        self.pattern_placeholder_nodes = self._plan.placeholders
        self.pattern_returning_nodes = self._plan.returning
        self.pattern_anchors = self._plan.anchors
        tests_of(self._plan, root, match_modules, match_placeholder)  # refuses what can be refused now

    @property
    def plan(self) -> Pattern:
        """The pattern as it is searched for."""
        return self._plan

    def match(self, graph: Graph, node_name_match: str = "") -> list[InternalMatch]:
        """Return the matches in `graph`, in the order of the nodes that match the pattern's first output.

        With `node_name_match`, a node whose name contains that text matches an output of the pattern, whatever it
        calls. Nothing is changed. O(nodes of the graph x nodes of the pattern), in practice O(nodes of the graph); more
        where matches overlap and are kept, where outputs of the pattern have no input in common, and, with
        `commutative`, for patterns with many operands to exchange.

        Raises:
            PatternError: modules are to be compared by class, and the graph does not know its module.
        """
        return self.find(graph, graph.owning_module, node_name_match)

    def find(self, graph: Graph, root: nn.Module | None, node_name_match: str = "") -> list[InternalMatch]:
        """Return the matches in `graph`, whose targets `root` has; see `match`."""
        tests = tests_of(self._plan, root, self.match_modules, self.match_placeholder)
        if node_name_match:
            for anchor in self._plan.anchors:
                tests[anchor] = AlsoNamed(tests[anchor], node_name_match)
        search = Search(
            self._plan,
            tests,
            graph,
            root,
            apart=self.remove_overlapping_matches,
            ignore_literals=self.ignore_literals,
            commutative=self.commutative,
        )
        return [self._match_of(nodes_map) for nodes_map in search.run()]

    def _match_of(self, nodes_map: dict[Node, Any]) -> InternalMatch:
        return InternalMatch(
            anchors=self._plan.anchors,
            nodes_map=nodes_map,
            placeholder_nodes=[nodes_map[node] for node in self._plan.placeholders],
            returning_nodes=[nodes_map[node] for node in self._plan.returning],
        )


class SubgraphMatcherWithNameNodeMap(SubgraphMatcher):
    """Finds a pattern that names its nodes: the last thing that it returns is a dict from names to them.

    `name_node_map` of each match maps those names to the nodes of the graph. The pattern itself is not changed. The
    other arguments, and errors, are those of `SubgraphMatcher`.

    Raises:
        PatternError: the pattern does not return values and, last, a dict of nodes.
    """

    def __init__(
        self,
        pattern_gm: Source,
        match_output: bool = False,
        match_placeholder: bool = False,
        remove_overlapping_matches: bool = True,
        ignore_literals: bool = False,
        *,
        match_modules: MatchModules = "path",
        commutative: bool = False,
    ) -> None:
        graph, self._root = graph_of(pattern_gm, "pattern")
        # A copy without the names; the pattern is not ours to change.
        graph = copy.deepcopy(graph)
        graph.owning_module = self._root
        output = graph.output_node()
        value = output.args[0]
        if not isinstance(value, (tuple, list)) or len(cast(tuple[Any, ...], value)) < 2 or not _is_naming(value[-1]):
            raise PatternError(
                f"the pattern must return values and, last, a dict from names to nodes, but returns {value}; "
                "use SubgraphMatcher for a pattern without names"
            )
        output.args = (tuple(value[:-1]),)
        self._named: dict[str, Node] = dict(value[-1])
        super().__init__(
            graph,
            match_output,
            match_placeholder,
            remove_overlapping_matches,
            ignore_literals,
            match_modules=match_modules,
            commutative=commutative,
        )

    def match(self, graph: Graph, node_name_match: str = "") -> list[InternalMatch]:
        """Return the matches in `graph`, with names; see `SubgraphMatcher.match`."""
        matches = super().match(graph, node_name_match)
        for match in matches:
            match.name_node_map = {name: match.nodes_map[node] for name, node in self._named.items()}
        return matches


def _is_naming(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(node, Node) for node in cast(dict[Any, Any], value).values())
