"""Say which nodes a backend supports, in the form that torch.fx's partitioner asks for."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from featx.errors import GraphError
from featx.ir.names import qualified_name
from featx.ir.node import Node

CALLABLE_NODE_OPS = frozenset({"call_module", "call_function", "call_method"})
# By the name of a target: None for any dtype, or the dtypes of positional arguments (None: any) and of those by name.
SupportDict: TypeAlias = Mapping[
    str, tuple[Sequence[Sequence[torch.dtype] | None], Mapping[str, Sequence[torch.dtype]]] | None
]
IsNodeSupported: TypeAlias = Callable[[Mapping[str, nn.Module], Node], bool]


class OperatorSupportBase(abc.ABC):
    """Says of a node whether a backend supports it."""

    @abc.abstractmethod
    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        """Return whether `node`, whose submodules are `dict(module.named_modules())`, is supported."""


class OperatorSupport(OperatorSupportBase):
    """Supports the targets in a dict from the names that `get_node_target` gives to dtypes.

    A value of None allows any dtype; else it is a sequence of dtypes for each positional argument (None: any) and a
    dict of them for arguments by name. Arguments that are no nodes are not looked at. Inputs, reads of attributes and
    outputs are supported.
    """

    def __init__(self, support_dict: SupportDict | None = None) -> None:
        self._support_dict: SupportDict = support_dict or {}

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        """Return whether the dict has the target of `node`, with the dtypes of its inputs.

        Raises:
            GraphError: a dtype is asked for and not known.
        """
        if node.op not in CALLABLE_NODE_OPS:
            return True
        target = get_node_target(submodules, node)
        if target not in self._support_dict:
            return False
        dtypes = self._support_dict[target]
        if dtypes is None:
            return True
        by_position, by_name = dtypes
        wanted = [
            *zip(node.args, by_position, strict=False),
            *((node.kwargs.get(name), allowed) for name, allowed in by_name.items()),
        ]
        return all(
            allowed is None or not isinstance(value, Node) or _dtype_of(value) in allowed for value, allowed in wanted
        )


class OpSupports:
    """Makes rules to be combined with `chain` and `any_chain`."""

    @classmethod
    def decline_if_input_dtype(cls, dtype: torch.dtype) -> OperatorSupportBase:
        """Return the rule that nodes with an input of this dtype are not supported."""
        return create_op_support(
            lambda _, node: all(_dtype_of(source) != dtype for source in node.all_input_nodes),
        )

    @classmethod
    def decline_if_node_in_names(cls, disallow_set: Collection[str]) -> OperatorSupportBase:
        """Return the rule that nodes of these names are not supported."""
        return create_op_support(lambda _, node: node.name not in disallow_set)


class _Rule(OperatorSupportBase):
    def __init__(self, rule: IsNodeSupported) -> None:
        self._rule = rule

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        return self._rule(submodules, node)


def create_op_support(is_node_supported: IsNodeSupported) -> OperatorSupportBase:
    """Return the rule that a function of the submodules and a node gives."""
    return _Rule(is_node_supported)


def chain(*op_support: OperatorSupportBase) -> OperatorSupportBase:
    """Return the rule that all of the given ones hold; they are asked in order, up to the first that does not."""
    return _Rule(lambda submodules, node: all(rule.is_node_supported(submodules, node) for rule in op_support))


def any_chain(*op_support: OperatorSupportBase) -> OperatorSupportBase:
    """Return the rule that one of the given ones holds; they are asked in order, up to the first that does."""
    return _Rule(lambda submodules, node: any(rule.is_node_supported(submodules, node) for rule in op_support))


def get_node_target(submodules: Mapping[str, nn.Module], node: Node) -> str:
    """Return what a node calls, as a name: the class of a module, the name of a function, the name of a method.

    Raises:
        GraphError: the node calls nothing.
    """
    if node.op == "call_module":
        return _class_name(type(submodules[node.target]))
    if node.op == "call_function":
        return target_name(node.target)
    if node.op != "call_method":
        raise GraphError(f"node '{node.name}' is a {node.op} and calls nothing; expected one of {CALLABLE_NODE_OPS}")
    return node.target


def target_name(function: Callable[..., Any]) -> str:
    """Return the dotted name of a function as torch.fx writes it, which has `_operator` for the module operator."""
    name = qualified_name(function)
    return f"_{name}" if name.startswith("operator.") else name


def is_node_output_tensor(node: Node) -> bool:
    """Say whether the value of a node is known to be a tensor, from what ShapeProp or featx.trace put into its meta."""
    kind: Any = node.meta.get("type")
    return "dtype" in node.meta or (isinstance(kind, type) and issubclass(kind, torch.Tensor))


def _class_name(kind: type) -> str:
    # Under the name by which people import it: torch.nn.modules.conv.Conv2d.
    return f"{kind.__module__}.{kind.__qualname__}"


def _dtype_of(node: Node) -> Any:
    known = node.meta.get("tensor_meta")
    for dtype in (getattr(known, "dtype", None), node.meta.get("dtype"), node.meta.get("type")):
        if dtype is not None:
            return dtype
    raise GraphError(f"the dtype of node '{node.name}' is not known; run ShapeProp, or trace with featx.trace")
