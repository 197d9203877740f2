"""Give a function a name by which the code that torch.fx generates calls it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.fx.graph
import torch.fx.node

from featx.codegen.identifiers import is_dotted_name
from featx.ir.names import name_of_target, resolve


class Named:
    """A callable in a graph of torch.fx that has no name of its own by which torch.fx's code could call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name_of_target(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def has_name(function: Callable[..., Any]) -> bool:
    """Say whether torch.fx's code calls `function` itself by the name that it has for it."""
    try:
        name = torch.fx.node._get_qualified_name(function)
        is_from_torch = torch.fx.graph._is_from_torch(function)
    except (AttributeError, RuntimeError, TypeError):
        return False
    if getattr(function, "__module__", None) == "_operator":
        return getattr(operator, function.__name__, None) is function
    return not is_from_torch or (is_dotted_name(name) and resolve(name) is function)
