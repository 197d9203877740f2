"""Say which values and which calls the code that torch.fx generates has otherwise than the graph, or not at all.

torch.fx writes most values as `repr` does, and some calls as statements that also assign their first argument.
"""

from __future__ import annotations

import enum
import math
import operator
from typing import Any

import torch

from featx.errors import GraphError
from featx.interop.named import has_name
from featx.ir.graph import Graph
from featx.ir.identifiers import is_plain
from featx.ir.node import Node
from featx.ir.python_operators import AUGMENTED

_BY_REPR: frozenset[type] = frozenset(
    {
        int, bool, float, type(None), type(Ellipsis),
        torch.device, torch.dtype, torch.layout, torch.memory_format,
    }
)  # fmt: skip
# torch.fx takes each line of its code away in which this stands, as it marks lines so itself.
LINE_MARK = "# COUNTER: "
_BY_NAME = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)


def is_written(value: Any, *, nested: bool) -> bool:  # Any: whatever stands in the arguments of a node
    """Say whether torch.fx's code has `value` as what it is; False if there is a node in it.

    `nested` says that it stands in a dict or a named tuple, of which torch.fx writes the `repr`.
    """
    kind = type(value)
    if kind in _BY_REPR:
        return True
    if kind is str:
        return LINE_MARK not in value
    if kind is bytes:
        return LINE_MARK.encode() not in value
    if kind is complex:
        # The repr of one that has a zero, nan or inf in it is another number, or no number.
        return bool(value.real and value.imag and math.isfinite(value.real) and math.isfinite(value.imag))
    if kind is range:
        return True
    if kind is tuple or isinstance(value, list):
        return all(is_written(item, nested=nested) for item in value)
    if kind is slice:
        return all(is_written(item, nested=nested) for item in (value.start, value.stop, value.step))
    if kind in (set, frozenset):
        return all(is_written(item, nested=True) for item in value)
    if isinstance(value, dict):
        return all(is_written(item, nested=True) for pair in value.items() for item in pair)
    if nested:
        return False
    if isinstance(value, enum.Enum):
        # A combination of flags has no member of its own.
        name = value._name_
        return type(value).__members__.get(name) is value and is_plain(name) and has_name(type(value))
    return isinstance(value, _BY_NAME) and has_name(value)


def last_readers(graph: Graph) -> dict[Node, Node]:
    """Map each node that is read to the last node that reads it. O(nodes + edges)."""
    last: dict[Node, Node] = {}
    for node in reversed(graph.nodes):
        for source in node.all_input_nodes:
            last.setdefault(source, node)
    return last


def is_misread(node: Node, last: dict[Node, Node]) -> bool:
    """Say whether torch.fx's code for `node` takes or leaves its first argument otherwise than the graph.

    `last` is what `last_readers` gave. `x += y` assigns x, which others may read later, and cannot assign a literal;
    `-2 ** x` is `-(2 ** x)`; `-1.real` is no better.
    """
    if not node.args:
        return False
    first = node.args[0]
    # Written as `x += y; result = x`, which gives x another value where the call makes a new object.
    if node.op == "call_function" and node.target in AUGMENTED:
        return not isinstance(first, Node) or last[first] is not node
    if node.op == "call_method" or (node.op == "call_function" and node.target in (operator.pow, getattr)):
        return type(first) in (int, float)
    return False


def is_misread_attribute(node: Node) -> bool:
    """Say whether torch.fx's code for `node` writes the attribute that it reads as an identifier, and it is none."""
    if node.target is not getattr or len(node.args) != 2:
        return False
    name = node.args[1]
    return isinstance(name, str) and name.isidentifier() and not is_plain(name)


def refuse_read_setitem(node: Any) -> None:  # Any: a node of featx or of torch.fx
    """Raise where others read the value of an assignment to an item.

    Raises:
        GraphError: they do.
    """
    if node.target is not operator.setitem or not node.users:
        return
    readers = ", ".join(f"'{user.name}'" for user in node.users)
    raise GraphError(
        f"node '{node.name}' writes an item and is read by {readers}: its value is None, but in torch.fx's code it is "
        "what was written into; let them read one of the two"
    )
