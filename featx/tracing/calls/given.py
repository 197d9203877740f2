"""The lists, dicts and objects that a call which is one node is given, and may change."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch

from featx.rebuilding import attributes_of, set_attributes
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.objects.containers import copy_of, items_by_key, refill
from featx.tracing.objects.plain_objects import PLAIN_TYPES
from featx.tracing.objects.structure import parts_of
from featx.tracing.signals import UnsupportedValue


def _is_for_tensors(items: list[Any] | dict[Any, Any]) -> bool:
    """Say whether there is a tensor among items, or there are none, so that a call may put some there."""
    values = items.values() if isinstance(items, dict) else items
    return not items or any(isinstance(item, torch.Tensor) for item in values)


class Given:
    """The lists, dicts and objects among the arguments of a call, and what they held before it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parts = [part for part, _ in parts_of((args, kwargs)) if part is not kwargs]
        self._containers = [(each, copy_of(each)) for each in parts if isinstance(each, (list, dict))]
        self._objects = [(each, attributes_of(each)) for each in parts if is_dataclass(each)]
        held = (*self._containers, *self._objects)
        self._ids = {id(each) for each, items in held if _is_for_tensors(items)}
        # The positions and names of the arguments that hold them.
        arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()] if self._ids else []
        self._arguments = dict(arguments)
        self.places = [place for place, value in arguments if any(id(part) in self._ids for part, _ in parts_of(value))]

    def left_at(self, place: int | str, argument_of: Callable[[Any], Any]) -> Any:
        """Return what the argument at a place holds now, as `check_held` compares it; `argument_of` makes nodes."""

        def left(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return [left(item) for item in value]
            if isinstance(value, dict) or is_dataclass(value):
                items = copy_of(value) if isinstance(value, dict) else attributes_of(value)
                return {key: left(item) for key, item in items.items()}
            if isinstance(value, TracedNumber) or not isinstance(value, (torch.Tensor, *PLAIN_TYPES)):
                return ...
            return argument_of(value)

        return left(self._arguments[place])

    @contextmanager
    def put_back_on_error(self) -> Generator[None]:
        """Put back what they held if the `with` block raises: the module is then called again, and looked into."""
        try:
            yield
        except BaseException:
            for container, items in self._containers:
                refill(container, items)
            for value, attributes in self._objects:
                for name in attributes_of(value).keys() - attributes.keys():
                    object.__delattr__(value, name)
                set_attributes(value, attributes)
            raise

    def refuse_same(self, result: Any) -> None:
        """Raise if the call returns a list, dict or object that it was given: in a graph it would be another one.

        Raises:
            UnsupportedValue: it does.
        """
        if self._ids and any(id(part) in self._ids for part, _ in parts_of(result)):
            raise UnsupportedValue(
                "a call that is one node returns a list, a dict or an object that it is given,", result
            )

    def refuse_numbers(self) -> None:
        """Raise if the call has put a number or a text there, of which the graph would make a constant.

        Raises:
            UnsupportedValue: it has.
        """
        for container, items in self._containers:
            before, now = items_by_key(items), items_by_key(container)
            added = [item for key, item in now.items() if key not in before or item is not before[key]]
            if any(type(item) in PLAIN_TYPES for item in added):
                raise UnsupportedValue(
                    f"a call that is one node puts a number or text into a {type(container).__name__} it is given,",
                    container,
                )
