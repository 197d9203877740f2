"""Split a graph module into children, by a function of its nodes or after chosen nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from featx.errors import PassError
from featx.ir.names import Namespace
from featx.ir.node import Node
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import Accesses
from featx.passes.lookup import find_nodes
from featx.passes.modes import Modes
from featx.passes.submodules import ChildForm, Regrouping


def split_module(
    m: GraphModule,
    root_m: nn.Module | None,
    split_callback: Callable[[Node], object],
    qualname_map: dict[str, str] | None = None,
    keep_original_order: bool = True,
    keep_original_node_name: bool = True,
    keep_original_input_name: bool = True,
    *,
    partition_affix: str | None = None,
    tuple_return: bool = False,
) -> GraphModule:
    """Return a module that computes what `m` does, with a child for each value that `split_callback` gives.

    The child for 0 is `submod_0`, that for "stem" `submod_stem`. Children get what they read as positional arguments,
    under the names of the nodes, and return what is read outside, as a tuple where that is not one value; parameters
    and buffers they read themselves. They run in an order in which values, writes into shared memory and random draws
    come as in `m`, and each sets gradient and autocast modes anew. `m` is not changed; submodules and tensors are
    shared. O(nodes + edges).

    Args:
        m: the module to split.
        root_m: not used; torch.fx has it here.
        split_callback: called for each call of the graph, in order; parts differ by the `str` of what it returns.
        qualname_map: gets the path in `m` for the path of each module that a child calls.
        keep_original_order: not used: children keep the order of their first nodes wherever they can.
        keep_original_node_name: not used: nodes keep their names.
        keep_original_input_name: False numbers the inputs of children: `arg_0`, `arg_1`...
        partition_affix: with "pp", children are `submod_pp_0`, `submod_pp_1`...
        tuple_return: whether children return tuples of one value too.

    Raises:
        PassError: two parts need each other, or a part runs in a mode that cannot be set again.
    """
    accesses = Accesses(check_graph_module(m))
    modes = Modes(m.graph, accesses)
    stem = "submod" if partition_affix is None else f"submod_{partition_affix}"
    namespace = Namespace()
    for node in m.graph.find_nodes(op="get_attr"):
        namespace.reserve(node.target.partition(".")[0])
    names: dict[str, str] = {}
    name_of: dict[Node, str] = {}
    for node in m.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            key = str(split_callback(node))
            if not modes.is_switch(node):
                if key not in names:
                    names[key] = namespace.create_name(f"{stem}_{key}")
                name_of[node] = names[key]
    for node in m.graph.find_nodes(op="get_attr"):
        # Only where somebody may assign the attribute anew during the run; other reads are copied.
        first = min(node.users, default=None)
        if first in name_of:
            name_of[node] = name_of[first]
    if qualname_map is not None:
        calls = [node for node in name_of if node.op == "call_module"]
        qualname_map.update({f"{name_of[node]}.{node.target}": node.target for node in calls})
    form = ChildForm(sets_modes=True, numbers_inputs=not keep_original_input_name, returns_tuple=tuple_return)
    return Regrouping(m, name_of, accesses, form).build()


def split_at(gm: GraphModule, names: Iterable[str | Node]) -> GraphModule:
    """Return a module that computes what `gm` does in stages `submod_0`, `submod_1`..., cut after the named nodes.

    A node is named by itself, by its name, or by the path of a module, which means the last node in it. Each stage
    holds what `gm` computes between two cuts; see `split_module`. `gm` is not changed. O(nodes + edges).

    Raises:
        NodeNameError: `gm` has no such node.
        PassError: a stage would be empty, or no node is named.
    """
    cuts = sorted(set(find_nodes(check_graph_module(gm), names)))
    if not cuts:
        raise PassError("split_at needs at least one node to cut after")
    stages: dict[Node, int] = {}
    stage = 0
    for node in gm.graph.nodes:
        stages[node] = stage
        if stage < len(cuts) and node is cuts[stage]:
            stage += 1
    used = {stages[node] for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr", "output")}
    for number, cut in enumerate([*cuts, None]):
        if number not in used:
            where = f"after '{cuts[-1].name}'" if cut is None else f"before the cut after '{cut.name}'"
            raise PassError(f"a stage would be empty: nothing is computed {where}; leave that cut out")
    return split_module(gm, None, stages.__getitem__)
