"""Tell in which gradient and autocast mode each node runs, and lead a graph that is being written into that mode."""

from __future__ import annotations

import dataclasses

import torch
from torch.amp import autocast_mode

from featx.errors import PassError
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.passes.accesses import Accesses
from featx.passes.lookup import quoted


@dataclasses.dataclass(frozen=True)
class Mode:
    """What switches are in force: the gradient mode, None for the caller's, and the autocast regions, outermost first.

    A gradient mode that the graph computes is the node that does so. `others` counts switches of other kinds.
    """

    gradients: bool | Node | None = None
    regions: tuple[Node, ...] = ()
    others: int = 0


class Modes:
    """The mode of each node of `graph`, as it is now. O(nodes)."""

    def __init__(self, graph: Graph, accesses: Accesses) -> None:
        self._modes: dict[Node, Mode] = {}
        self._switches: set[Node] = set()
        mode = Mode()
        for node in graph.nodes:
            self._modes[node] = mode
            if accesses.effects.of(node).changes_global_state and not accesses.sets_seed(node):
                self._switches.add(node)
                mode = self._switched(mode, node)
        for node in graph.nodes:
            if node.target is torch.is_grad_enabled and node.users and self._switches.issuperset(node.users):
                self._switches.add(node)

    def at(self, node: Node) -> Mode:
        """Return the mode in which `node` runs."""
        return self._modes[node]

    def is_switch(self, node: Node) -> bool:
        """Say whether `node` switches a mode, or only asks for the mode that is to be put back."""
        return node in self._switches

    def _switched(self, mode: Mode, switch: Node) -> Mode:
        if switch.target in (torch._C._set_grad_enabled, torch.set_grad_enabled) and len(switch.args) == 1:
            value = switch.args[0]
            if isinstance(value, Node) and value.target is torch.is_grad_enabled:
                value = self._modes[value].gradients
            return dataclasses.replace(mode, gradients=value)
        if switch.target is autocast_mode._enter_autocast:
            return dataclasses.replace(mode, regions=(*mode.regions, switch))
        if switch.target is autocast_mode._exit_autocast and mode.regions[-1:] == switch.args[:1]:
            return dataclasses.replace(mode, regions=mode.regions[:-1])
        return dataclasses.replace(mode, others=mode.others + 1)


class ModeWriter:
    """Writes switches at the end of `graph`, which another graph's nodes are being copied into."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._mode = Mode()
        self._caller: Node | None = None
        # The region of the other graph, and the node that enters it here.
        self._entered: list[tuple[Node, Node]] = []

    def switch_to(self, mode: Mode, node: Node) -> None:
        """Add what leads from the mode that the graph is in to `mode`, for `node` of the other graph. O(changes).

        Raises:
            PassError: `mode` is one that no switch leads to: it is computed, or set by a function that is not known.
        """
        if mode == self._mode:
            return
        is_computed = isinstance(mode.gradients, Node) or any(region.all_input_nodes for region in mode.regions)
        if mode.others or is_computed:
            raise PassError(
                f"{quoted(node)} runs in a mode that cannot be set again in another graph: {mode}; "
                "keep what is switched so in one leaf module"
            )
        self._apply(mode)

    def switch_back(self) -> None:
        """Add what leads back to the mode of the caller. O(changes)."""
        self._apply(Mode())

    def _apply(self, mode: Mode) -> None:
        self._leave_to(mode.regions)
        for region in mode.regions[len(self._entered) :]:
            entered = self._graph.call_function(region.target, region.args, region.kwargs)
            self._entered.append((region, entered))
        if mode.gradients is not self._mode.gradients:
            self._set_gradients(mode.gradients)
        self._mode = mode

    def _leave_to(self, regions: tuple[Node, ...]) -> None:
        common = 0
        while common < min(len(regions), len(self._entered)) and self._entered[common][0] is regions[common]:
            common += 1
        while len(self._entered) > common:
            self._graph.call_function(autocast_mode._exit_autocast, (self._entered.pop()[1],))

    def _set_gradients(self, value: bool | Node | None) -> None:
        if self._caller is None:
            self._caller = self._graph.call_function(torch.is_grad_enabled)
        self._graph.call_function(torch._C._set_grad_enabled, (self._caller if value is None else value,))
