"""Tell whether a second call differs from the first one only in what the first one has put into caches."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from featx.ir.ancestors import with_ancestors
from featx.ir.effects import Effects
from featx.ir.form import sources_of_values
from featx.ir.graph import Graph
from featx.ir.memory import MemoryGroups
from featx.ir.names import qualified_name
from featx.ir.node import Node
from featx.ir.operator_facts import VIEW_ATTRIBUTES, facts_of_call
from featx.tracing.guards.guards import check_aliases
from featx.tracing.history.lineage import Origin, source_node
from featx.tracing.side_effects.forward_side_effects import depends_on_inputs
from featx.tree import tensors_in, tree_leaves

# By the id of a tensor that has lived on: where the first call had it from.
_Origins = Mapping[int, Origin]


def differ_only_by_caches(
    first: Graph, second: Graph, origins: _Origins, root: nn.Module, requested: Collection[Node] = ()
) -> bool:
    """Say whether `second` computes what `first` does, with tensors of the first call in place of their computation.

    What depends on values of the inputs must be the same calls in the same order, with the same arguments, where a
    tensor of `origins`, or a node of `first`, counts as what the first call made it from. What depends on constants and
    sizes alone may be missing, and so may `views_for_their_form`. But `second` must compute the value of each node of
    `first` that is `requested`, under any name; or the first call has put into a cache what it computed from that, and
    `second` computes nothing else in its place. O(nodes + edges).
    """
    before, values, known = _of_both(first, origins, root)
    numbers_of_first = values.count
    if before != known.of(second, Effects(second, root)):
        return False
    computed = known.all()
    missing = [node for node in requested if values.nodes[node] not in computed]
    computes_more = max(computed, default=0) >= numbers_of_first
    return not missing or (not computes_more and with_ancestors(map(source_node, origins.values())).issuperset(missing))


def first_new_value(first: Graph, second: Graph, origins: _Origins, root: nn.Module) -> Node | None:
    """Return the first node of `second` that computes what `first` does not; None if there is none. O(nodes + edges).

    As in `differ_only_by_caches`, what the first call made a tensor from counts as that tensor.
    """
    _, values, known = _of_both(first, origins, root)
    numbers_of_first = values.count
    known.of(second, Effects(second, root))
    new = (node for node, number in known.nodes.items() if number >= numbers_of_first)
    return next((node for node in new if not node.meta.get("is_guard")), None)


def _of_both(first: Graph, origins: _Origins, root: nn.Module) -> tuple[list[int], _Values, _Values]:
    """Return the numbers of the steps of `first`, those of its values, and what numbers a second graph like it."""
    values, effects = _Values(), Effects(first, root)
    steps = values.of(first, effects)
    memory = MemoryGroups(first, effects)
    written = memory.written()
    for node in first.nodes:
        if memory.of(node) in written:
            values.forget_conversion(node)
    return steps, values, _Values(values, {key: values.of_origin(origin) for key, origin in origins.items()})


def views_for_their_form(graph: Graph, effects: Effects) -> set[Node]:
    """Return the views of one value that only its form is read of, as x[0] in `torch.zeros_like(x[0])`. O(nodes)."""
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if not _is_view(node) or len(node.all_input_nodes) != 1 or tensors_in((node.args, node.kwargs)):
            continue
        is_read = any(user not in found and node in sources_of_values(user) for user in node.users)
        if node.users and not is_read and not effects.is_impure(node):
            found.add(node)
    return found


def _is_view(node: Node) -> bool:
    if node.target is getattr:
        return node.args[1] in VIEW_ATTRIBUTES
    return facts_of_call(node).may_be_view or node.target is operator.getitem


def keeps_drawn_numbers(
    first: Graph, second: Graph, origins: _Origins, root: nn.Module, *, is_real: bool = True
) -> bool:
    """Say whether `second` uses random numbers that the first call has drawn: a graph would draw them anew.

    `root` has the modules that the graphs call. Where no shape follows from values, which `first` shows unless it
    `is_real`, `torch.arange(n, device=x.device)` uses nothing of x that is drawn. O(nodes + edges).
    """
    used = used_of_first(first, second, origins)
    effects = Effects(first, root)
    may_draw_forms = is_real or any(node.meta.get("has_dynamic_shape") for node in first.nodes)
    sources = with_ancestors(used) if may_draw_forms else with_ancestors(used, sources_of_values)
    return any(effects.of(node).is_random for node in sources)


def used_of_first(first: Graph, second: Graph, origins: _Origins) -> set[Node]:
    """Return the nodes of the first call whose values stand in the graph of the second one. O(nodes)."""
    used: set[Node] = set()
    for node in second.nodes:
        for leaf in tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in origins:
                used.add(source_node(origins[id(leaf)]))
            elif isinstance(leaf, Node) and leaf.graph is first:
                used.add(leaf)
    return used


class _Values:
    """Numbers the values of a graph, so that the same calls with the same arguments have the same number.

    Args:
        earlier: the values of a graph that is compared with it, whose calls have the same numbers. Proxies that live on
            bring its nodes into arguments.
        tensors: the numbers of tensors that stand in arguments, by their ids.
    """

    def __init__(self, earlier: _Values | None = None, tensors: Mapping[int, int] | None = None) -> None:
        self.nodes: dict[Node, int] = {}
        self._nodes_of_earlier: Mapping[Node, int] = {} if earlier is None else earlier.nodes
        self._tensors = tensors or {}
        self._by_call: dict[Any, int] = {} if earlier is None else earlier._by_call
        # By the number of a converted value: how it was converted, without what.
        self._conversions: dict[int, Any] = {} if earlier is None else earlier._conversions

    @property
    def count(self) -> int:
        """How many numbers there are, for all graphs that are compared."""
        return len(self._by_call)

    def forget_conversion(self, node: Node) -> None:
        """Forget that a value is a conversion, because something writes into it: converted again, it is another one."""
        self._conversions.pop(self.nodes[node], None)

    def of(self, graph: Graph, effects: Effects) -> list[int]:
        """Number all values of the graph; return those of what depends on values of the inputs, and of the output."""
        found: list[int] = []
        for_form = views_for_their_form(graph, effects)
        for node in graph.nodes:
            number = self.nodes[node] = self._number(node)
            is_step = node.op in ("placeholder", "output") or (node not in for_form and depends_on_inputs(node))
            if is_step and node.target is not check_aliases:  # of which a call without some code needs none
                found.append(number)
        return found

    def all(self) -> set[int]:
        """Return the numbers of all values of the graph, and of tensors in arguments."""
        # Checks give no value, and their messages name nodes, which are others in another graph.
        of_nodes = {number for node, number in self.nodes.items() if not node.meta.get("is_guard")}
        return of_nodes | {*self._tensors.values()}

    def of_origin(self, origin: Origin) -> int:
        """Return the number of a value of the graph."""
        if isinstance(origin, Node):
            return self.nodes.get(origin, -1)
        if origin.node is not None and origin.node in self.nodes:
            return self.nodes[origin.node]
        owner = self.of_origin(origin.owner)
        key = (0, owner), self._key(origin.key)
        return self._number_of(("call_function", identity_of(origin.function), key, ()))

    def _number(self, node: Node) -> int:
        args, kwargs = self._key(node.args), self._key(node.kwargs)
        how = node.op, identity_of(node.target)
        if not _converts(node):
            return self._number_of((*how, args, kwargs))
        # `self.mean = self.mean.to(x.device)` computes the same in each call.
        conversion, is_numbered, converted = (*how, args[1:], kwargs), args[0][0] == 0, args[0][1]
        if is_numbered and self._conversions.get(converted, ()) == conversion:
            return converted
        number = self._number_of((*how, args, kwargs))
        self._conversions[number] = conversion
        return number

    def _number_of(self, call: Any) -> int:
        return self._by_call.setdefault(call, self.count)

    def _key(self, value: Any) -> Any:
        if isinstance(value, Node):
            return 0, self.nodes[value] if value in self.nodes else self._nodes_of_earlier[value]
        if isinstance(value, torch.Tensor):
            known = self._tensors.get(id(value))
            return (1, id(value)) if known is None else (0, known)
        if isinstance(value, (tuple, list)):
            return tuple([self._key(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self._key(item)) for name, item in value.items()])
        if isinstance(value, slice):
            return 2, self._key(value.start), self._key(value.stop), self._key(value.step)
        return type(value).__name__, identity_of(value)


def _converts(node: Node) -> bool:
    """Say whether a node calls a conversion of torch on a tensor: operators of other libraries may have its name."""
    if not node.args or not isinstance(node.args[0], (Node, torch.Tensor)):
        return False
    is_of_library = node.op == "call_function" and qualified_name(node.target).startswith("torch.ops.")
    return facts_of_call(node).converts and not is_of_library


def identity_of(value: Any) -> Any:
    """Return what is equal for targets or constants that are the same; lambdas are made anew in each call."""
    if isinstance(value, FunctionType):
        return id(value.__code__)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return repr(value) if isinstance(value, float) else value
