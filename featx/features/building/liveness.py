"""Which nodes of a graph must run so that chosen ones have the values that the model computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from torch import nn

from featx.features.building.case_state import StateUse
from featx.ir.ancestors import with_ancestors
from featx.ir.effects import Effects
from featx.ir.form import computes_form
from featx.ir.graph import Graph
from featx.ir.literal_sizes import literal_sizes
from featx.ir.memory import MemoryGroups
from featx.ir.module_effects import module_writes_state
from featx.ir.node import Node
from featx.ir.operator_facts import facts_of
from featx.ir.torch_layers import is_torch_layer
from featx.tracing.nodes.module_output import guards_ahead_of_return
from featx.tracing.objects.module_parts import tensors_at
from featx.tracing.source_writes.possible_writes import can_return_input
from featx.tracing.source_writes.state_writes import StateWrite

# Those that read or write tensors of the model.
_STATEFUL = ("get_attr", "call_module")


def last_needed(graph: Graph, requested: Iterable[Node], root: nn.Module) -> Node:
    """Return the last node of a traced graph that `prune` would keep. O(nodes + edges)."""
    return max(Liveness(graph, set(requested), root).kept)


class Liveness:
    """Which nodes of a graph must run so that the requested ones have the values that the model computes.

    Args:
        graph: a traced graph of `root`.
        requested: the nodes whose values are returned.
        root: the model, in the mode in which it was traced.
        read_elsewhere: ids of tensors of the model that another graph of it reads.

    Attributes:
        kept: the nodes that must run.
        graph: the graph.
        effects: the effects of its calls.
        memory: which values may share memory.
        possibly_returned: calls, with the inputs that they may return; these are in one group of `memory`.
        literals: reads of sizes that a number takes the place of, so that what only a check asks for its size need not
            be computed.
    """

    def __init__(
        self, graph: Graph, requested: set[Node], root: nn.Module, read_elsewhere: frozenset[int] = frozenset()
    ) -> None:
        self.kept: set[Node] = set()
        self._end = max(requested)
        self._read_elsewhere = read_elsewhere
        self.graph = graph
        self._root = root
        self._requested = requested
        self.effects = Effects(graph, root)
        self.memory = MemoryGroups(graph, self.effects)
        self.memory.join_shared_state(root)
        self.possibly_returned: list[tuple[Node, Node]] = []
        self._join_inputs_that_may_be_returned()
        self.literals = self._sizes_of_others()
        # What Python decided on the way to the requested values must still hold.
        hooks = self._gradient_hooks_of_requested()
        ahead = {each for node in requested for each in guards_ahead_of_return(node)}
        # Decisions after a value that a later call of its module may depend on.
        ahead |= {node for node in graph.nodes if node.meta.get("may_call")}
        self._required = requested | hooks | ahead | self._guards_ahead_of(max(requested | hooks | ahead))
        self._sweep()
        while self._require_state_writers():
            self._sweep()
        self._keep_checks()

    def _sizes_of_others(self) -> dict[Node, int]:
        """Return the sizes that the graph states of values from which no requested one is computed, by their nodes."""
        sizes = literal_sizes(self.graph)
        needed = with_ancestors(self._requested) if sizes else set[Node]()
        return {
            node: size for node, size in sizes.items() if node not in self._requested and not _is_size_of(node, needed)
        }

    def _gradient_hooks_of_requested(self) -> set[Node]:
        """Return the calls of `register_hook` and the like on requested values, which change gradients alone."""
        return {
            node
            for node in self.graph.nodes
            if node.op == "call_method"
            and node.args[0] in self._requested
            and facts_of(str(node.target)).changes_gradients
        }

    def _join_inputs_that_may_be_returned(self) -> None:
        # A module of the user may return one of its inputs for other inputs, although it did not for the example. Then
        # the result and that input share memory, which matters where one of them is written later.
        calls = [node for node in self.graph.nodes if "effects" in node.meta]
        writers = [node for node in self.graph.nodes if self.effects.of(node).writes] if calls else []
        is_new = True
        while is_new:
            is_new = False
            last_writers = {group: writer for writer in writers for group in self.memory.written_by(writer)}
            for call in [call for call in calls if self._is_written(call, last_writers)]:
                calls.remove(call)
                if can_return_input(self.effects.module_of(call) if call.op == "call_module" else call.target):
                    is_new = True
                    for source in call.all_input_nodes:
                        self.memory.join(call, source)
                        self.possibly_returned.append((call, source))

    def _is_written(self, call: Node, last_writers: Mapping[int, Node]) -> bool:
        """Say whether the result of a call is written, or one of its inputs after it."""
        if self.memory.of(call) in last_writers:
            return True
        writers = [last_writers.get(self.memory.of(source)) for source in call.all_input_nodes]
        return any(writer is not None and writer > call for writer in writers)

    def _sweep(self) -> None:
        # Backwards, so that everything that reads a value, or memory, is known when its writers are looked at.
        required = set(self._required)
        end = max(required)
        read_later: set[int] = set()
        draws_later = False
        # A switch that is thrown before the end is thrown back after it.
        switches = [node for node in self.graph.nodes if self.effects.of(node).changes_global_state]
        is_switched = any(node < end for node in switches)
        for node in reversed(self.graph.nodes):
            effects = self.effects.of(node)
            is_switch = effects.changes_global_state and is_switched
            is_behind = node > end and node not in required
            if node.op == "output" or (is_behind and node.op != "placeholder" and not is_switch):
                continue
            if (
                node in required
                or node.op == "placeholder"
                or is_switch
                or (effects.is_random and draws_later)
                or not read_later.isdisjoint(self.memory.changed_by(node))
            ):
                self.kept.add(node)
                required.update(each for each in node.all_input_nodes if each not in self.literals)
                read_later |= self.memory.read_by(node)
                draws_later = draws_later or effects.is_random

    def _require_state_writers(self) -> bool:
        """Require what writes the model's tensors that the kept part reads: the next call will see it."""
        state = {self.memory.of(node) for node in self.kept if node.op == "get_attr"}
        state |= {self.memory.state_of(node) for node in self.kept if node.op == "call_module"}
        decisions, state_of_decisions = self._decisions_about_state()
        writers = {
            node
            for node in self.graph.nodes
            if node not in self.kept
            and not (state | state_of_decisions).isdisjoint(self._written_by(node))
            and self._is_known_to_write(node)
        }
        if self._read_elsewhere:
            writers |= {
                node
                for node, paths in self._left_out()
                if not tensors_at(self._root, paths).isdisjoint(self._read_elsewhere)
            }
        if writers:
            # What they write follows from what Python has decided before them.
            decisions |= writers | self._guards_ahead_of(max(writers))
        is_new = not decisions <= self._required
        self._required |= decisions
        return is_new

    def state_use(self) -> StateUse:
        """Return what of the model the kept part reads, and what the rest writes before the last requested value."""
        read = frozenset(str(node.target) for node in self.kept if node.op in _STATEFUL)
        return StateUse(read, frozenset[str]().union(*(paths for _, paths in self._left_out())))

    def _left_out(self) -> list[tuple[Node, set[str]]]:
        """Return calls before the last requested value that are not kept, with the paths of what they write."""
        others = (node for node in self.graph.nodes if node not in self.kept and node < self._end)
        written = {
            node: groups for node in others if self._is_known_to_write(node) and (groups := self._written_by(node))
        }
        paths: dict[int, set[str]] = {}
        for node in self.graph.nodes if written else ():
            if node.op in _STATEFUL:
                group = self.memory.kept_by(node)
                paths.setdefault(group, set()).add(str(node.target))
        found = ((node, [paths[group] for group in groups if group in paths]) for node, groups in written.items())
        return [(node, set[str]().union(*places)) for node, places in found if places]

    def _is_known_to_write(self, node: Node) -> bool:
        """Say whether the writes of a call count: those of an unknown function, if it was seen to get such a tensor."""
        is_measured = "effects" in node.meta and any(source.op == "get_attr" for source in node.all_input_nodes)
        return is_measured or not self.effects.of(node).is_opaque

    def _decisions_about_state(self) -> tuple[set[Node], set[int]]:
        """Return the guards that hold off writes to the model's tensors that the kept part reads.

        And the memory from which these writes would compute: a graph for other inputs has them.
        """
        guards = {
            node: node.meta["possible_state_writes"]
            for node in self.graph.nodes
            if "possible_state_writes" in node.meta
        }
        if not guards:
            return set(), set()
        pending = set[StateWrite]().union(*guards.values())
        stateful = [node for node in self.graph.nodes if node.op in ("get_attr", "call_module")]
        tensors = {node: tensors_at(self._root, [node.target]) for node in stateful}
        read = set[int]().union(*(tensors[node] for node in stateful if node in self.kept))
        found: set[StateWrite] = set()
        while matching := {each for each in pending if not read.isdisjoint(tensors_at(self._root, each.written))}:
            pending -= matching
            found |= matching
            read |= tensors_at(self._root, chain.from_iterable(each.read for each in matching))
        if not found:
            return set(), set()
        others = [node for node in stateful if not read.isdisjoint(tensors[node])]
        memory = self.memory
        deciding = {node for node, missed in guards.items() if not found.isdisjoint(missed)}
        return deciding, {memory.kept_by(node) for node in others}

    def _guards_ahead_of(self, end: Node) -> set[Node]:
        """Return the checks before a node; not those of a result whose form is always the same: it may be left out."""
        return {
            node
            for node in self.graph.nodes
            if node.meta.get("is_guard") and node < end and node.meta.get("form_follows_from") != "nothing"
        }

    def _written_by(self, node: Node) -> set[int]:
        """Return the groups that a call writes. Where no trace has measured it, modules in eval mode write no state."""
        if node.op != "call_module" or "effects" in node.meta:
            return self.memory.written_by(node)
        module = self._root.get_submodule(node.target)
        is_known_to_write = is_torch_layer(type(module)) and module_writes_state(module)
        if not module.training and not is_known_to_write:
            return {self.memory.of(target) for target in self.effects.of(node).writes}
        return self.memory.written_by(node)

    def _keep_checks(self) -> None:
        end = max(self._required)
        for node in self.graph.nodes:
            if node < end and self.effects.of(node).is_check:
                path = self._form_of_kept(node)
                if path is not None:
                    self.kept |= path

    def _form_of_kept(self, check: Node) -> set[Node] | None:
        """Return what `check` needs besides kept nodes, or None where that is more than the form of values."""
        needed = {check}
        pending = check.all_input_nodes
        while pending:
            node = pending.pop()
            if node in self.kept or node in needed:
                continue
            if not computes_form(node):
                return None
            needed.add(node)
            pending += node.all_input_nodes
        return needed


def _is_size_of(node: Node, values: set[Node]) -> bool:
    """Say whether a node, which is an item of a shape, is a size of one of `values`."""
    (shape,) = node.all_input_nodes
    return not values.isdisjoint(shape.all_input_nodes)
