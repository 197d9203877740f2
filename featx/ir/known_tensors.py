"""Which nodes are known to give a tensor, and no list, tuple or dict of tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from featx.ir.node import Node
from featx.ir.operator_facts import facts_of_call, is_magic
from featx.ir.paths import held_at, module_at
from featx.ir.torch_layers import is_torch_layer

# What gives a tensor if an operand is one; with `r` or `i` before the name too.
_KEEPING = frozenset("add sub mul truediv floordiv mod pow and or xor getitem pos neg invert".split())
# Layers of torch.nn that return a tuple, or what they are given.
_OTHERS = (
    nn.Identity, nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention, nn.AdaptiveLogSoftmaxWithLoss, nn.ModuleList,
    nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
)  # fmt: skip


class KnownTensors:
    """Says which values of a graph are tensors, by what a trace noted and by the calls; answers are remembered.

    Args:
        root: the module that has the graph's targets, if there is one.
    """

    def __init__(self, root: object | None) -> None:
        self._root = root
        self._known: dict[Node, bool] = {}

    def has(self, value: Any) -> bool:
        """Say whether an argument is known to be a tensor. O(nodes that it is computed from) for the first time."""
        if not isinstance(value, Node):
            return isinstance(value, torch.Tensor)
        pending = [value]
        while pending:
            node = pending[-1]
            # As loops: graphs are deeper than Python recurses.
            operands = _operands_that_decide(node)
            unknown = [] if "dtype" in node.meta else [each for each in operands if each not in self._known]
            if unknown:
                pending += unknown
                continue
            self._known[node] = self._is_tensor(node, operands)
            pending.pop()
        return self._known[value]

    def _is_tensor(self, node: Node, operands: list[Node]) -> bool:
        if "dtype" in node.meta:
            return True
        if node.op == "get_attr":
            return isinstance(held_at(self._root, node.target), torch.Tensor)
        if node.op == "call_module":
            return _returns_tensor(module_at(self._root, node.target))
        if name := _name(node):
            return "matmul" in name or any(self._known[each] for each in operands)
        return facts_of_call(node).returns_tensor


def _operands_that_decide(node: Node) -> list[Node]:
    """Return the operands of an operator of Python of which one that is a tensor makes the result a tensor."""
    name = _name(node)
    if name not in _KEEPING and name[1:] not in _KEEPING:
        return []
    return [each for each in node.args[: 1 if name == "getitem" else None] if isinstance(each, Node)]


def _name(node: Node) -> str:
    """Return the name of the operator of Python that a node calls, or an empty text."""
    if node.op == "call_method":
        return node.target[2:-2] if is_magic(node.target) else ""
    function = node.target
    is_operator = getattr(function, "__module__", None) == operator.add.__module__
    return function.__name__.rstrip("_") if node.op == "call_function" and is_operator else ""


def _returns_tensor(module: nn.Module | None) -> bool:
    if module is None or not is_torch_layer(type(module)) or isinstance(module, _OTHERS):
        return False
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and _returns_tensor(module[-1])
    return not module.__dict__.get("return_indices")
