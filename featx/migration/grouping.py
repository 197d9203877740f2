"""Split a graph by tags on its nodes, and reach attributes by path, with the surface of torch.fx's tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from featx.errors import PassError
from featx.ir.node import Node
from featx.migration.operator_support import CALLABLE_NODE_OPS
from featx.module import GraphModule
from featx.passes.accesses import Accesses
from featx.passes.submodules import ChildForm, Regrouping


def split_by_tags(
    gm: GraphModule, tags: Sequence[str], return_fqn_mapping: bool = False, return_tuple: bool = False
) -> Any:  # Any: what it returns depends on an argument, and the callers of torch.fx's know which it is
    """Return a module with a child for each of `tags`, which holds the nodes whose attribute `tag` is that.

    With `return_fqn_mapping` also the new path for each path in `gm` of a module that is called; with `return_tuple`
    children return tuples of one value too. `gm` is not changed. O(nodes + edges).

    Raises:
        PassError: a call has no tag, or none of `tags`; or two parts need each other.
    """
    names: dict[Node, str] = {}
    known = set(tags)
    for node in gm.graph.nodes:
        if node.op in CALLABLE_NODE_OPS:
            tag: Any = getattr(node, "tag", None)
            if tag not in known:
                raise PassError(f"node '{node.name}' has the tag {tag!r}; expected one of {', '.join(tags)}")
            names[node] = tag
    split = Regrouping(gm, names, Accesses(gm), ChildForm(sets_modes=True, returns_tuple=return_tuple)).build()
    if not return_fqn_mapping:
        return split
    return split, {node.target: f"{tag}.{node.target}" for node, tag in names.items() if node.op == "call_module"}


def getattr_recursive(obj: Any, name: str) -> Any:
    """Return the attribute at a dotted path, None where there is none."""
    for part in name.split("."):
        obj = getattr(obj, part, None)
    return obj


def setattr_recursive(obj: Any, attr: str, value: Any) -> None:
    """Set the attribute at a dotted path."""
    owner, _, name = attr.rpartition(".")
    setattr(getattr_recursive(obj, owner) if owner else obj, name, value)


def replace_target_nodes_with(
    fx_module: GraphModule, old_op: str, old_target: Any, new_op: str, new_target: Any
) -> None:
    """Let every node with this opcode and target have another opcode and target; arguments and names stay."""
    for node in fx_module.graph.nodes:
        if node.op == old_op and node.target == old_target:
            node.op, node.target = new_op, new_target
