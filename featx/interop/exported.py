"""What programs do that `torch.export` makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from featx.ir.memory import memory_of
from featx.ir.overloads import Signature
from featx.tree import tensors_in, tree_map


def writes_what_it_is_given(program: torch.export.ExportedProgram) -> bool:
    """Say whether a program writes a tensor of its module or its inputs, or a view of one. O(nodes).

    `graph_signature` does not say so for operators in place, as long as `run_decompositions` has not replaced them.
    """
    nodes = program.graph.nodes
    given = {memory_of(tensor) for node in nodes if node.op == "placeholder" for tensor in tensors_in(_value_of(node))}
    calls = [node for node in nodes if isinstance(node.target, torch._ops.OpOverload)]
    written = (Signature(node.target).targets(*tree_map(_value_of, (node.args, node.kwargs))) for node in calls)
    return any(memory_of(tensor) in given for tensors in written for tensor in tensors)


def _value_of(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, Node) else argument
