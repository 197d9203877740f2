"""Say of which Python type the value of a node is, where that is certain, and how an input is annotated."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import nn

from featx.ir.names import qualified_name
from featx.ir.node import Node
from featx.ir.operator_facts import VIEW_ATTRIBUTES, is_set
from featx.ir.paths import held_at

# The positions of the argument with which a pooling returns indices too.
_RETURN_INDICES_AT = {
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), 6),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), 2),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), 4),
}
_ARITHMETIC = frozenset(
    "add sub mul truediv floordiv mod pow neg pos matmul eq ne lt gt le ge and_ or_ xor invert lshift rshift "
    "iadd isub imul itruediv ifloordiv imod ipow abs".split()
)
# Modules of torch.nn that return one tensor for one tensor.
_TENSOR_MODULES = (
    "activation", "batchnorm", "channelshuffle", "container", "conv", "dropout", "flatten", "fold", "instancenorm",
    "linear", "normalization", "padding", "pixelshuffle", "pooling", "sparse", "upsampling",
)  # fmt: skip
_NOT_ONE_TENSOR = (nn.MultiheadAttention, nn.Sequential, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.ModuleList)


def value_type_of(node: Node, root: nn.Module | None) -> type | None:
    """Return torch.Tensor, int, float, bool, torch.Size or tuple where the value is one for sure, else None.

    O(nodes that it is computed from); without recursion, for chains of any length.
    """
    known: dict[Node, type | None] = {}
    pending = [node]
    while pending:
        current = pending[-1]
        unknown = [source for source in current.all_input_nodes if source not in known]
        if unknown and current.op in ("call_method", "call_function"):
            pending += unknown
            continue
        pending.pop()
        if current not in known:
            known[current] = _kind_of(current, known, root)
    return known[node]


def type_of_option(value: object) -> Any:  # Any: an annotation
    """Return how to annotate an input that has a plain value, for TorchScript, which takes others for tensors."""
    return Optional[Any] if value is None else type(value)  # noqa: UP045 - TorchScript reads no `|` in a string


def _kind_of(node: Node, known: dict[Node, type | None], root: nn.Module | None) -> type | None:
    if node.op == "placeholder":
        return torch.Tensor if node.type in (torch.Tensor, "Tensor", "torch.Tensor") else None
    if node.op == "get_attr":
        value = held_at(root, node.target)
        return (nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor) if torch.is_tensor(value) else None
    if node.op == "call_module":
        return _kind_of_module(held_at(root, node.target))
    if node.op == "call_method":
        return _kind_of_method(node, known)
    if node.op == "call_function":
        return _kind_of_function(node, known)
    return None


def _is_tensor(kind: type | None) -> bool:
    return kind is not None and issubclass(kind, torch.Tensor)


def _kind_of_module(module: Any) -> type | None:
    package, _, name = type(module).__module__.rpartition(".")
    if package != "torch.nn.modules" or name not in _TENSOR_MODULES or isinstance(module, _NOT_ONE_TENSOR):
        return None
    return None if getattr(module, "return_indices", False) else torch.Tensor


def _kind_of_method(node: Node, known: dict[Node, type | None]) -> type | None:
    owner = node.args[0] if node.args else None
    if not isinstance(owner, Node) or not _is_tensor(known[owner]):
        return None
    name = node.target
    if name == "size":
        return int if len(node.args) > 1 or node.kwargs else torch.Size
    if name in ("dim", "numel", "nelement", "element_size", "get_device"):
        return int
    return None if name == "nonzero" else _kind_of_operator(name)


def _kind_of_function(node: Node, known: dict[Node, type | None]) -> type | None:
    function = node.target
    module, _, name = qualified_name(function).rpartition(".")
    if module == "operator" or not module:
        return _kind_of_python_operator(node, name, known)
    if isinstance(function, type):
        return function
    if getattr(math, name, None) is function:
        return int if name in ("ceil", "floor", "trunc", "gcd", "lcm", "comb", "perm", "factorial") else float
    if module == "torch.nn.functional":
        position = _RETURN_INDICES_AT.get(name)
        gives_indices = is_set(node.args, node.kwargs, "return_indices", position) or name.endswith("with_indices")
        return None if gives_indices or name == "multi_head_attention_forward" else torch.Tensor
    if name == "nonzero":
        return None
    if module in ("torch", "torch._C._nn", "torch.Tensor"):
        return _kind_of_operator(name)
    return torch.Tensor if module == "torch.functional" and name in ("einsum", "norm", "cdist", "tensordot") else None


def _kind_of_operator(name: str) -> type | None:
    """Return torch.Tensor where every overload of the operator returns exactly one tensor."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    results = [[str(result.type) for result in schema.returns] for schema in schemas]
    return torch.Tensor if results and all(result == ["Tensor"] for result in results) else None


def _kind_of_python_operator(node: Node, name: str, known: dict[Node, type | None]) -> type | None:
    kinds = [known[value] if isinstance(value, Node) else type(value) for value in node.args]
    if name == "getattr" and _is_tensor(kinds[0]):
        attribute = node.args[1]
        if attribute == "shape":
            return torch.Size
        if attribute == "ndim":
            return int
        return torch.Tensor if attribute in VIEW_ATTRIBUTES else None
    if name == "getitem":
        if _is_tensor(kinds[0]):
            return torch.Tensor
        if kinds[0] is torch.Size:
            return torch.Size if isinstance(node.args[1], slice) else int
        return None
    if name not in _ARITHMETIC:
        return None
    if any(map(_is_tensor, kinds)):
        return torch.Tensor
    if name in ("eq", "ne", "lt", "gt", "le", "ge") and all(kind in (int, float) for kind in kinds):
        return bool
    if all(kind is int for kind in kinds):
        if name in ("pow", "ipow"):  # 2 ** -1 is a float
            return None
        return float if name in ("truediv", "itruediv") else int
    return float if all(kind in (int, float) for kind in kinds) else None
