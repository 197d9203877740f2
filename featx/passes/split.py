"""Split a graph module into children, by a function of its nodes or behind chosen nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from featx.errors import ArgumentTypeError, PassError
from featx.ir.names import Namespace
from featx.ir.node import Node
from featx.module import GraphModule
from featx.passes.accesses import Accesses
from featx.passes.lookup import find_nodes
from featx.passes.modes import Modes
from featx.passes.submodules import Regrouping


def split_module(gm: GraphModule, partition: Callable[[Node], Hashable]) -> GraphModule:
    """Return a module that computes what `gm` does, with a child for each value that `partition` gives.

    `partition` is asked about each call; a read of a parameter or buffer belongs to every part that uses it, and
    gradient and autocast modes are set by each part anew. A part with the key 0 is the child `submod_0`, one with the
    key "stem" the child `stem`. Children get what they read as positional arguments and return what is read outside,
    as a tuple where that is not one value. They run in an order in which values, writes into shared memory and random
    draws come as in `gm`. `gm` is not changed; submodules and tensors are shared. O(nodes + edges).

    Raises:
        ArgumentTypeError: `partition` gives a key that is not hashable.
        PassError: two parts need each other, or a part runs in a mode that cannot be set again.
    """
    accesses = Accesses(gm)
    modes = Modes(gm.graph, accesses)
    names: dict[Hashable, str] = {}
    namespace = _names_of_children()
    name_of: dict[Node, str] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or modes.is_switch(node):
            continue
        key = _checked_key(partition(node), node)
        if key not in names:
            wish = key if isinstance(key, str) else f"submod_{key if isinstance(key, int) else len(names)}"
            names[key] = namespace.create_name(wish)
        name_of[node] = names[key]
    for node in gm.graph.find_nodes(op="get_attr"):
        # Only where somebody may assign the attribute anew during the run; other reads are copied.
        first = min(node.users, default=None)
        if first in name_of:
            name_of[node] = name_of[first]
    return Regrouping(gm, name_of, accesses, owns_modes=True).build()


def split_at(gm: GraphModule, names: Iterable[str | Node]) -> GraphModule:
    """Return a module that computes what `gm` does in stages `submod_0`, `submod_1`..., cut behind the named nodes.

    A node is named by itself, by its name, or by the path of a module, which means the last node in it. Each stage
    holds what `gm` computes between two cuts; see `split_module`. `gm` is not changed. O(nodes + edges).

    Raises:
        NodeNameError: `gm` has no such node.
        PassError: a stage would be empty, or no node is named.
    """
    cuts = sorted(set(find_nodes(gm, names)))
    if not cuts:
        raise PassError("split_at needs at least one node to cut behind")
    stages: dict[Node, int] = {}
    stage = 0
    for node in gm.graph.nodes:
        stages[node] = stage
        if stage < len(cuts) and node is cuts[stage]:
            stage += 1
    used = {stages[node] for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")}
    for number, cut in enumerate([*cuts, None]):
        if number not in used:
            where = f"behind '{cuts[-1].name}'" if cut is None else f"before the cut behind '{cut.name}'"
            raise PassError(f"a stage would be empty: nothing is computed {where}; leave that cut out")
    return split_module(gm, stages.__getitem__)


def _checked_key(key: object, node: Node) -> Hashable:
    if not isinstance(key, Hashable):
        raise ArgumentTypeError(f"partition gave {key!r} for node '{node.name}'; a key must be hashable, as an int is")
    return key


def _names_of_children() -> Namespace:
    """Return a namespace without the names that a graph module uses itself."""
    namespace = Namespace()
    for name in (*dir(GraphModule), *GraphModule.__annotations__, "training"):
        namespace.reserve(name)
    return namespace
