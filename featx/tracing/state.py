"""Keep what a model's forward changes on its modules during a trace, and put it back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, set)


class ModuleState:
    """The attributes of one module: which objects they are, and the items of plain lists, dicts and sets.

    Parameters and buffers are watched as dicts of objects; their values are not copied.
    """

    __slots__ = ("_attributes", "_items", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = module.__dict__.copy()
        self._items = [
            (value, value.copy()) for value in self._attributes.values() if isinstance(value, _CONTAINERS) and value
        ]

    def rebound_buffers(self) -> list[str]:
        """Return the names of buffers that are another object now."""
        buffers = self._attributes["_buffers"]
        before = next((items for value, items in self._items if value is buffers), buffers)
        return [name for name, value in buffers.items() if value is not before.get(name)]

    def restore(self) -> None:
        """Put every attribute, and every item of a container, back."""
        state = self._module.__dict__
        for name in [name for name in state if name not in self._attributes]:
            del state[name]
        for name, value in self._attributes.items():
            if state.get(name) is not value:
                state[name] = value
        for container, items in self._items:
            _refill(container, items)
        for value in self._attributes.values():
            # What was empty before has no copy.
            if isinstance(value, _CONTAINERS) and value and all(value is not known for known, _ in self._items):
                value.clear()


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, list):
        if len(container) != len(items) or any(one is not other for one, other in zip(container, items, strict=True)):
            container[:] = items
    elif isinstance(container, dict):
        same = len(container) == len(items) and all(container.get(key) is value for key, value in items.items())
        if not same:
            container.clear()
            container.update(items)
    elif container != items:
        container.clear()
        container.update(items)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the random generators of Python, torch (CPU) and, where it is loaded, numpy back afterwards."""
    numpy = sys.modules.get("numpy")
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)


def python_random_position() -> object:
    """Return something that changes when Python's or numpy's global generator is drawn from."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, position, *rest = numpy.random.get_state()
    return random.getstate(), kind, position, tuple(rest), keys[:8].tolist()
