"""Move groups of nodes into graph modules of their own, which the graph calls in their place."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence

from torch import nn

from featx.errors import PassError
from featx.ir.node import Node
from featx.module import GraphModule
from featx.passes.accesses import Accesses
from featx.passes.lookup import quoted
from featx.passes.modes import Modes
from featx.passes.ordering import first_order
from featx.passes.partial_copy import PartialCopy


@dataclasses.dataclass(frozen=True)
class ChildForm:
    """What children are like.

    With `sets_modes` each sets the gradient and autocast modes of its nodes itself, and switches have no group;
    otherwise switches stay in the outer graph, and no group may lie on both sides of one. `numbers_inputs` names their
    inputs `arg_0`, `arg_1`... and not as the nodes; with `returns_tuple` they return a tuple of one value too.
    """

    sets_modes: bool
    numbers_inputs: bool = False
    returns_tuple: bool = False


class Regrouping:
    """Turns `gm` into a module that calls one child for each group of its nodes.

    Nodes without a group stay in the outer graph. Groups run in an order in which values, writes to memory and random
    draws come as they did. Reads of attributes are copied to where they are used.

    Args:
        gm: the module; it is not changed, and its submodules and tensors are shared.
        names: the name of the child, by node.
        accesses: what the nodes of `gm` read and write.
        form: what children are like.
    """

    def __init__(self, gm: GraphModule, names: Mapping[Node, str], accesses: Accesses, form: ChildForm) -> None:
        self._gm = gm
        self._form = form
        self._accesses = accesses
        self._modes = Modes(gm.graph, accesses) if form.sets_modes else None
        self._inner = [node for node in gm.graph.nodes if self._is_inner(node)]
        self._units: list[list[Node]] = []
        self._names: list[str | None] = []
        self._unit_of: dict[Node, int] = {}
        self._assign(names)
        # For each pair of units of which one must run first: the nodes for which it must.
        self._edges: dict[tuple[int, int], tuple[Node, Node]] = {}
        for first, second in accesses.dependencies(self._inner, in_modes=not form.sets_modes):
            pair = (self._unit_of[first], self._unit_of[second])
            if pair[0] != pair[1]:
                self._edges.setdefault(pair, (first, second))

    def build(self) -> GraphModule:
        """Return the new module. O(nodes + edges), and O(units * log(units)) for their order.

        Raises:
            PassError: groups need each other's values, or part of one runs in a mode that cannot be set again.
        """
        outer = PartialCopy(self._gm.graph)
        for node in self._gm.graph.nodes:
            if node.op == "placeholder":
                outer.add(node)
        children: dict[str, nn.Module] = {}
        for unit in self._order():
            name = self._names[unit]
            if name is None:
                for node in self._units[unit]:
                    self._add_reads(outer, node)
                    outer.add(node)
            else:
                children[name] = self._child(unit, name, outer)
        output = self._gm.graph.output_node()
        self._add_reads(outer, output)
        graph = outer.finish(output.args[0])
        graph.output_node().meta = dict(output.meta)
        module = GraphModule(_with_children(self._gm, children), graph, self._gm._get_name())
        module.meta.update(self._gm.meta)
        self._accesses.share_assigning_modules(module)
        return module

    def _is_inner(self, node: Node) -> bool:
        is_switch = self._modes is not None and self._modes.is_switch(node)
        return node.op not in ("placeholder", "output") and not is_switch and not self._accesses.is_fixed_read(node)

    def _assign(self, names: Mapping[Node, str]) -> None:
        units: dict[str, int] = {}
        for node in self._inner:
            name = names.get(node)
            unit = len(self._units) if name is None else units.setdefault(name, len(self._units))
            if unit == len(self._units):
                self._units.append([])
                self._names.append(name)
            self._units[unit].append(node)
            self._unit_of[node] = unit

    # -- order -------------------------------------------------------------------------------------------------------

    def _order(self) -> list[int]:
        """Return the units in an order that respects the edges, otherwise by their first nodes."""
        order = first_order(len(self._units), self._edges)
        if len(order) < len(self._units):
            raise self._cycle_error(set(range(len(self._units))).difference(order))
        return order

    def _cycle_error(self, stuck: set[int]) -> PassError:
        # Each unit that could not run waits for another one that could not.
        earlier = {second: first for first, second in self._edges if first in stuck and second in stuck}
        path = [next(iter(stuck))]
        while path[-1] not in path[:-1]:
            path.append(earlier[path[-1]])
        cycle = path[path.index(path[-1]) :]
        reasons: list[str] = []
        for second, first in itertools.pairwise(cycle):
            before, behind = self._edges[first, second]
            how = "reads" if before in behind.all_input_nodes else "must run after"
            reasons.append(f"{quoted(behind)} ({self._names[second]}) {how} {quoted(before)} ({self._names[first]})")
        return PassError(
            f"the parts {sorted({str(self._names[unit]) for unit in cycle})} cannot run one after the other: "
            f"{', '.join(reversed(reasons))}. Put these nodes into one part, or into more parts."
        )

    # -- graphs ------------------------------------------------------------------------------------------------------

    def _child(self, unit: int, name: str, outer: PartialCopy) -> GraphModule:
        """Return the module for `unit`, and call it at the end of the outer graph."""
        nodes = self._units[unit]
        inner = PartialCopy(self._gm.graph, self._modes)
        inputs = self._inputs(unit)
        for number, node in enumerate(inputs):
            inner.add_input(node, f"arg_{number}" if self._form.numbers_inputs else node.name)
        for node in nodes:
            self._add_reads(inner, node)
            inner.add(node)
        outputs = [node for node in nodes if self._is_read_outside(node, unit)]
        is_single = len(outputs) == 1 and not self._form.returns_tuple
        graph = inner.finish(outputs[0] if is_single else tuple(outputs))
        call = outer.graph.call_module(name, tuple([outer.of(node) for node in inputs]))
        if is_single:
            outer.let_stand_for(outputs[0], call)
        else:
            self._unpack(call, outputs, outer)
        child = GraphModule(self._gm, graph, name)
        self._accesses.share_assigning_modules(child)
        return child

    def _inputs(self, unit: int) -> list[Node]:
        inputs: dict[Node, None] = {}
        for node in self._units[unit]:
            for source in node.all_input_nodes:
                if self._unit_of.get(source) != unit and not self._accesses.is_fixed_read(source):
                    inputs[source] = None
        return list(inputs)

    def _is_read_outside(self, node: Node, unit: int) -> bool:
        return any(self._unit_of.get(user) != unit for user in node.users)

    def _unpack(self, call: Node, outputs: Sequence[Node], outer: PartialCopy) -> None:
        for index, node in enumerate(outputs):
            part = outer.graph.call_function(operator.getitem, (call, index), name=node.name)
            outer.let_stand_for(node, part)

    def _add_reads(self, copy: PartialCopy, node: Node) -> None:
        for source in node.all_input_nodes:
            if self._accesses.is_fixed_read(source) and not copy.has(source):
                copy.add(source)


def _with_children(gm: GraphModule, children: Mapping[str, nn.Module]) -> nn.Module:
    """Return what has the targets of `gm` and the children, to be shared from; `gm` is not changed."""
    root = nn.Module()
    root.__dict__.update(gm.__dict__)
    root.__dict__["_modules"] = {**gm._modules, **children}
    return root
