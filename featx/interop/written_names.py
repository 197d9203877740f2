"""Say which names the code that torch.fx generates does not read as what they are.

torch.fx writes keywords, methods and paths as they are, and types of torch by the names that they say they have.
"""

from __future__ import annotations

import typing
from typing import Any

import torch.fx.graph
import torch.fx.node

from featx.codegen.identifiers import is_dotted_name, is_literal_text
from featx.errors import ArgumentTypeError
from featx.interop.written import LINE_MARK
from featx.ir.identifiers import is_plain
from featx.ir.node import Node


def refuse_unwritten_names(node: Node) -> None:
    """Raise where torch.fx's code would not read a name that `node` has as that name.

    Raises:
        ArgumentTypeError: its name, a keyword, its target or its type is such a name.
    """
    if type(node.name) is not str or not node.name.isprintable():
        raise ArgumentTypeError(f"its name {node.name!r} cannot be printed; assign another one to node.name")
    for key in node.kwargs:
        if not is_plain(key):
            raise ArgumentTypeError(
                f"its code cannot pass the keyword {key!r}, as it writes keywords bare; pass that argument by position"
            )
    if node.op == "call_method" and not is_plain(node.target):
        raise ArgumentTypeError(
            f"its code cannot call the method {node.target!r} by this name; "
            "read it with a call_function node of getattr and call that"
        )
    if node.op in ("call_module", "get_attr") and not _is_written_path(node.target):
        raise ArgumentTypeError(
            f"its code cannot read the attribute at {node.target!r}; rename it in the model to an identifier"
        )
    if node.type is not None and not _is_written_type(node.type):
        raise ArgumentTypeError(f"its code has no name for the type {node.type!r}; set node.type to None")


def _is_written_path(path: str) -> bool:
    """Say whether torch.fx's code reads the attribute at the dotted `path`: it writes each name as it is."""
    return LINE_MARK not in path and all(
        is_plain(name) if name.isidentifier() else is_literal_text(name) for name in path.split(".")
    )


def _is_written_type(kind: Any) -> bool:  # Any: an annotation
    """Say whether torch.fx's code has a name or a global for the annotation `kind` and for each part of it."""
    if torch.fx.graph._is_from_torch(kind):
        return is_dotted_name(torch.fx.node._get_qualified_name(kind))
    parts = (getattr(kind, "__origin__", None), *typing.get_args(kind))
    return all(_is_written_type(part) for part in parts if part is not None)
