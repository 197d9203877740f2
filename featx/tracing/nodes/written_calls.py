"""Calls of torch in the form in which the model writes them: as operators, methods or functions."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from featx.ir.arguments import Argument
from featx.ir.node import Target
from featx.tracing.nodes.operators import COMPARISONS, MAGIC, OPERATORS, REFLECTED, UNARY
from featx.tracing.source_uses.syntax_queries import is_comparison, written_operator, written_sign


def as_written(
    function: Callable[..., Any], args: tuple[Argument, ...], kwargs: dict[str, Argument], frame: FrameType | None
) -> tuple[str, Target, tuple[Argument, ...], str | None]:
    """Return opcode, target, arguments and name for a torch call, as the model writes it: an operator, a method...

    Args:
        function: what the function mode has got.
        args: the arguments of the node.
        kwargs: those by name.
        frame: the code of the model that makes the call; None where it is not known.
    """
    name = function.__name__
    if not kwargs and len(args) == 1 and name in UNARY and frame is not None:
        sign, target = UNARY[name]
        if written_sign(frame) == sign:
            return "call_function", target, args, None
    if not kwargs and len(args) > 1:
        if name in COMPARISONS and frame is not None and is_comparison(frame):
            return "call_function", COMPARISONS[name], args, None
        known = OPERATORS.get(name)
        if known is not None and frame is not None and written_operator(frame) == known[0]:
            symbol, target = known
            # `x += y` is named as in a symbolic trace.
            return "call_function", target, args, target.__name__[1:] if symbol.endswith("=") else None
        reflected = REFLECTED.get(name)
        if reflected is not None:
            return "call_function", reflected, args[::-1], None
    magic = MAGIC.get(name)
    if magic is not None:
        return "call_function", magic, args, None
    if getattr(torch.Tensor, name, None) is function:
        return "call_method", name, args, None
    # `x ** 2` calls a function that torch has under no other name.
    magic_name = f"__i{name[:-1]}__" if name.endswith("_") else f"__{name}__"
    if magic_name in MAGIC and getattr(torch.Tensor, magic_name, None) is function:
        return "call_function", MAGIC[magic_name], args, None
    return "call_function", function, args, None
