"""Objects of kinds that no graph holds, in what a module returns: calls that make them anew each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from numbers import Number
from typing import Any, cast

import torch

from featx.ir.arguments import Argument
from featx.ir.node import Node
from featx.rebuilding import attributes_of, rebuild_object
from featx.tracing.objects.arrays import is_array_of_numbers, tensor_of
from featx.tracing.objects.plain_objects import is_plain_object
from featx.tracing.signals import UnsupportedValue


class ReturnedObjects:
    """Makes the objects in one result; what stands in two places is made once.

    Args:
        create_node: makes a node of the graph.
        create_arg: turns what is inside of an object into an argument.
    """

    def __init__(self, create_node: Callable[..., Node], create_arg: Callable[[Any], Argument]) -> None:
        self._create_node = create_node
        self._create_arg = create_arg
        # By the id of the object; None while it is made.
        self._made: dict[int, Node | None] = {}

    def create(self, value: Any) -> Node | None:
        """Return a call that makes an object of such a kind; None for other values.

        Raises:
            UnsupportedValue: it holds itself.
        """
        kind = type(value)
        if is_plain_object(value) and not is_dataclass(value):
            return self._rebuilt(value)
        if is_array_of_numbers(value):
            return self._call_method("numpy", self._call_method("clone", tensor_of(value)))
        if isinstance(value, Number) and kind.__module__ == "numpy":
            return self._create_node("call_function", kind, (cast(Any, value).item(),), {})
        if kind in (set, frozenset):
            items = [self._create_arg(item) for item in cast("set[Any]", value)]
            return self._create_node("call_function", kind, (items,), {})
        return None

    def size(self, sizes: tuple[Argument, ...]) -> Node:
        """Return a call that makes a `torch.Size`, which a graph would hold as a tuple."""
        return self._create_node("call_function", torch.Size, (sizes,), {})

    def _call_method(self, name: str, value: Any) -> Node:
        return self._create_node("call_method", name, (value,), {})

    def _rebuilt(self, value: Any) -> Node:
        if id(value) not in self._made:
            self._made[id(value)] = None
            attributes = {name: self._create_arg(item) for name, item in attributes_of(value).items()}
            node = self._create_node("call_function", rebuild_object, (type(value), attributes), {})
            self._made[id(value)] = node
        made = self._made[id(value)]
        if made is None:
            raise UnsupportedValue(f"a {type(value).__name__} that holds itself is returned", value)
        return made
