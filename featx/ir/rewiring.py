"""Let a node read other values than before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from featx.ir.arguments import Argument, collect_nodes, map_arg
from featx.ir.effects import MeasuredEffects
from featx.ir.node import Node


def replace_inputs(node: Node, replacements: Mapping[Node, Argument]) -> None:
    """Replace each input of `node` that is in `replacements`. O(arguments).

    What was measured of the call stays true.
    """
    inputs = node.all_input_nodes
    if replacements.keys().isdisjoint(inputs):
        return
    node.args = map_arg(node.args, lambda source: replacements.get(source, source))
    node.kwargs = map_arg(node.kwargs, lambda source: replacements.get(source, source))
    keep_measured_effects(node, [replacements.get(source, source) for source in inputs])


def keep_measured_effects(node: Node, earlier_inputs: list[Argument]) -> None:
    """Let measured effects, which number the inputs of `node`, mean what they meant for its inputs before.

    `earlier_inputs` has what stands for each of those now: a node, nodes in a list, or a constant.
    """
    measured: MeasuredEffects | None = node.meta.get("effects")
    if measured is None:
        return
    positions = {source: position for position, source in enumerate(node.all_input_nodes)}

    def moved(numbers: tuple[int, ...]) -> tuple[int, ...]:
        found: dict[Node, None] = {}
        for number in numbers:
            collect_nodes(earlier_inputs[number], found)
        return tuple([positions[source] for source in found])

    node.meta["effects"] = dataclasses.replace(measured, writes=moved(measured.writes), shares=moved(measured.shares))
