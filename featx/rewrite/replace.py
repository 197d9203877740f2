"""replace_pattern: find a pattern in the graph of a module, and put something else in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from featx.errors import ArgumentTypeError, PatternError
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.module import GraphModule, check_graph_module
from featx.rewrite.attributes import Attributes
from featx.rewrite.edit import Edit
from featx.rewrite.match import InternalMatch, SubgraphMatcher
from featx.rewrite.pattern import Source, graph_of
from featx.rewrite.replacement import Replacement
from featx.rewrite.safety import Safety
from featx.rewrite.site import Site
from featx.rewrite.targets import MatchModules, matched_paths
from featx.rewrite.unused import remove_unused_modules

MatchFilter: TypeAlias = Callable[[InternalMatch, Graph, Graph], bool]
ReplacementCallback: TypeAlias = Callable[[InternalMatch, Graph, Graph], Source]


class Match(NamedTuple):
    """A match that was replaced.

    `anchor` is the node of the pattern from which it was found, `nodes_map` maps the nodes of the pattern to those that
    were matched. Of these the operations are erased by now; what inputs of the pattern stand for (a node, a constant,
    a list) is in the graph.
    """

    anchor: Node
    nodes_map: dict[Node, Any]  # Any: an input of the pattern may stand for a constant


@dataclasses.dataclass
class ReplacedPatterns:
    """A match that was replaced, as `Match` says, and the nodes that were added for it, in order."""

    anchor: Node
    nodes_map: dict[Node, Any]  # Any: as above
    replacements: list[Node]


def replace_pattern(
    gm: GraphModule,
    pattern: Source,
    replacement: Source,
    *,
    match_modules: MatchModules = "path",
    commutative: bool = False,
) -> list[Match]:
    """Replace each match of `pattern` in the graph of `gm`, and return the matches that were replaced.

    Inputs and outputs of `pattern` and `replacement` correspond by position. What a match is, when it stays as it is,
    which modules a replacement means, what it costs and what is raised: see `replace_pattern_with_filters`.
    """
    replaced = replace_pattern_with_filters(
        gm, pattern, replacement, match_modules=match_modules, commutative=commutative
    )
    return [Match(found.anchor, found.nodes_map) for found in replaced]


def replace_pattern_with_filters(
    gm: GraphModule,
    pattern: Source,
    replacement: Source | None = None,
    match_filters: Iterable[MatchFilter] | None = None,
    ignore_literals: bool = False,
    replacement_callback: ReplacementCallback | None = None,
    node_name_match: str = "",
    *,
    match_modules: MatchModules = "path",
    commutative: bool = False,
) -> list[ReplacedPatterns]:
    """Replace each match of `pattern` in the graph of `gm`, and return the matches that were replaced.

    What a match is, `SubgraphMatcher` says; of matches that overlap, the first in graph order counts. `pattern` and
    `replacement` take the same inputs, in the same order, and return the same number of values. They are functions or
    modules, which are traced, or graphs.

    A match stays as it is where replacing it could change what the rest of the graph computes: something between its
    nodes writes what it reads, or reads what it writes; its result shares memory with a value that is written later
    and that of the replacement does not, or the other way round; an input of it is computed from an output of it.
    Unknown code counts as writing its arguments (see `ir/effects.py`). Otherwise the replacement goes before the
    first reader of the result, or where the last node of the match was.

    In `replacement`, a module or parameter at a path that the pattern has too is the one that was matched, with its
    weights, and so is what lies below it (`self.conv.weight`). One at any other path is, where modules match by path,
    what `gm` has there, as in torch.fx, if that differs in nothing but the values of its tensors; otherwise `gm` gets a
    copy of the replacement's, in eval mode if `gm` is, which all matches share. Submodules of `gm` that only replaced
    matches called are removed if the replacement is a module.

    The node that returns a value takes over the `meta` of the node that it replaces (its name, modules, source line,
    shape), except what describes the call; other new nodes take over its modules and source line.

    `gm` is changed, and recompiled when it runs; `pattern` and `replacement` are not. Of a module with a graph for each
    mode, the present one is rewritten. O(nodes of the graph x nodes of the pattern), in practice O(nodes of the graph).

    Args:
        gm: the module whose graph is rewritten.
        pattern: what to look for.
        replacement: what to put in its place.
        match_filters: functions of a match, the graph and the pattern's graph; a match for which one of them returns
            False stays as it is.
        ignore_literals: whether constants of the pattern match any value.
        replacement_callback: a function of the same arguments that returns the replacement for a match; it is called
            for every match before the graph is changed.
        node_name_match: a text; a node whose name contains it matches an output of the pattern, whatever it calls.
        match_modules: which modules match those of the pattern: at the same path (`"path"`), of the same class
            (`"type"`), or with the same settings too (`"config"`).
        commutative: whether the operands of sums, products and the like may be exchanged.

    Raises:
        PatternError: the pattern cannot be looked for, or the replacement does not fit it.
        TraceError: the pattern or the replacement cannot be traced.
        TargetError: the replacement refers to a module or tensor that neither it nor `gm` has.
        ArgumentTypeError: `gm` is no GraphModule, there is no replacement, or an option has no such value.
        GraphError: the graph of `gm` is malformed. After any of these errors `gm` is as it was.
    """
    _refuse(gm, replacement, replacement_callback)
    matcher = SubgraphMatcher(
        pattern, ignore_literals=ignore_literals, match_modules=match_modules, commutative=commutative
    )
    gm.graph.lint()
    matches = _accepted(matcher.find(gm.graph, gm, node_name_match), match_filters, gm.graph, matcher.pattern)
    replacements = _Replacements(matcher, gm.graph, replacement, replacement_callback)
    attributes = Attributes(gm, share=match_modules == "path")
    sites = [_site(matcher, match, replacements.of(match), attributes) for match in matches]
    # From here on nothing of the caller's runs, and nothing is refused: the graph is edited as a whole or not at all.
    edit = _edited(gm, sites)
    attributes.install(edit.targets)
    if replacements.has_modules and edit.replaced:
        remove_unused_modules(gm, edit.called_before)
    gm.graph.lint()
    return [
        ReplacedPatterns(site.match.anchors[0], site.match.nodes_map, added) for site, added in edit.replaced.items()
    ]


def _refuse(gm: object, replacement: object, replacement_callback: object) -> None:
    check_graph_module(gm)
    if replacement is None and replacement_callback is None:
        raise ArgumentTypeError("give a replacement, or a replacement_callback that makes one for each match")


def _accepted(
    matches: Iterable[InternalMatch], filters: Iterable[MatchFilter] | None, graph: Graph, pattern: Graph
) -> list[InternalMatch]:
    """Return the matches for which all filters return True."""
    filters = list(filters or ())
    return [match for match in matches if all(accepts(match, graph, pattern) for accepts in filters)]


def _site(matcher: SubgraphMatcher, match: InternalMatch, replacement: Replacement, attributes: Attributes) -> Site:
    matched = matched_paths(matcher.plan, match.nodes_map)
    return Site(matcher.plan, match, replacement, attributes.paths_for(replacement, matched or {}))


def _edited(gm: GraphModule, sites: Sequence[Site]) -> Edit:
    """Replace the matches at `sites`, as far as that is safe, and return what was done."""
    safety = Safety(gm.graph, gm, sites)
    edit = Edit(gm.graph, safety.may_move)
    for site, place in safety.places.items():
        edit.replace(site, place)
    edit.finish()
    return edit


class _Replacements:
    """The replacement of each match: always the same, or what a callback makes."""

    def __init__(
        self,
        matcher: SubgraphMatcher,
        graph: Graph,
        replacement: Source | None,
        callback: ReplacementCallback | None,
    ) -> None:
        self._matcher, self._graph, self._callback = matcher, graph, callback
        self._known: dict[Graph, Replacement] = {}
        self.has_modules = False
        self._common = None if callback is not None or replacement is None else self._prepare(replacement)

    def of(self, match: InternalMatch) -> Replacement:
        """Return the replacement of `match`."""
        if self._common is not None:
            return self._common
        assert self._callback is not None
        return self._prepare(self._callback(match, self._graph, self._matcher.pattern))

    def _prepare(self, source: Source) -> Replacement:
        graph, root = graph_of(source, "replacement")
        self.has_modules = self.has_modules or isinstance(source, nn.Module)
        if graph is self._graph or self._matcher.pattern is self._graph:
            raise PatternError("the graph to rewrite is the pattern or replacement itself; give a deepcopy of it")
        known = self._known.get(graph)
        if known is None:
            known = self._known[graph] = Replacement(graph, root, self._matcher.plan)
        return known
