"""Say what of a graph TorchScript cannot express, before it fails in words of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.amp import autocast_mode

from featx.errors import ScriptError
from featx.rebuilding import rebuild_dict, rebuild_list, rebuild_object, rebuild_tuple
from featx.tracing.guards.guards import check_aliases, check_constant, check_decision, check_form, check_same_items
from featx.tracing.guards.input_checks import check_is_same
from featx.tracing.objects.arrays import is_of_numpy

if TYPE_CHECKING:
    from featx.ir.graph import Graph
    from featx.ir.node import Node

_COMPARABLE = (
    bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device
)  # fmt: skip

# The Python module of what edits put into graphs.
_EDITS = "featx.features.requests.edits"


def require_scriptable(graph: Graph) -> None:
    """Raise if TorchScript is known to have no words for a node. O(nodes).

    Raises:
        ScriptError: it has none; the message names the node and says what to use.
    """
    for node in graph.nodes:
        for reason in _reasons(node):
            raise ScriptError(
                f"torch.jit.script cannot express node '{node.name}': {reason}. Use torch.compile or torch.export, or "
                "trace with tracer='symbolic' if the model allows"
            )


def _reasons(node: Node) -> Iterator[str]:
    if node.op == "placeholder" and node.target.startswith("*"):
        yield f"it has no inputs like {node.target}"
    elif node.target is torch._C._set_grad_enabled or node.target is autocast_mode._enter_autocast:
        yield "a function that switches gradients or autocast has to switch them back after an error"
    elif node.target in (check_constant, check_decision, check_is_same) and not isinstance(node.args[1], _COMPARABLE):
        yield f"it cannot compare a {type(node.args[1]).__name__}"
    elif getattr(node.target, "__module__", "") == _EDITS:
        yield "it cannot run an edit of featx"
    elif getattr(node.target, "__name__", "") == "<lambda>":
        yield "TorchScript cannot read the source of a lambda; use a named function"
    elif node.target in (rebuild_object, rebuild_tuple, rebuild_list, rebuild_dict):
        yield "it has no objects of classes of Python"
    elif is_of_numpy(node.target):
        yield "it has no functions of numpy"
    elif node.target is range:
        yield "TorchScript has no values of type range"
    elif node.target in (check_aliases, check_same_items):
        yield "it cannot check whether two values are one tensor"
    elif node.target is check_form and not _is_known(node.args[1]):
        yield "it cannot check a value that is nested like this"


def _is_known(form: Any, depth: int = 2) -> bool:
    """Say whether `text_of_form` can write a form."""
    if not isinstance(form, tuple):
        return form is None or isinstance(form, (bool, str))
    kind, *items = form
    if kind == "list" and depth and all(isinstance(item, str) and item.startswith("tensor") for item in items):
        return True
    # As many items as there are cases for.
    is_short = 2 <= len(items) <= depth + 2
    return kind in ("tuple", "list") and depth > 0 and is_short and all(_is_known(item, depth - 1) for item in items)
