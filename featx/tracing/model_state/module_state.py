"""Keep what a model's forward changes on its modules during a trace, and put it back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from featx.ir.memory import memory_of
from featx.ir.torch_layers import is_torch_layer
from featx.rebuilding import NO_VALUE
from featx.tracing.guards.scalars import TracedNumber
from featx.tracing.model_state.recurrent_weights import OF_WEIGHTS, follow_weights, weights_of
from featx.tracing.objects.containers import (
    DEPTH_IN_MODULES,
    LARGE,
    containers_in,
    copy_of,
    differences,
    has_items,
    items_by_key,
    refill,
)
from featx.tracing.objects.plain_objects import PLAIN_TYPES, is_plain_value
from featx.tracing.objects.python_state import PythonState

_PARTS = ("_parameters", "_modules")
_LAYER_PARTS = (*_PARTS, "_buffers")
# By the name of the dict of a module that holds them: their names, and they.
Parts = list[tuple[str, tuple[str, ...], tuple[Any, ...]]]
_EMPTY: dict[str, tuple[str, tuple[str, ...], tuple[Any, ...]]] = {name: (name, (), ()) for name in _LAYER_PARTS}
_KEPT = PLAIN_TYPES | {list, dict, set}
# Not put back: what nn.Module itself keeps, which other threads may change meanwhile, and what the trace lays over it.
_NOT_RESTORED = frozenset({*nn.Module().__dict__, "_call_impl", "_compiled_call_impl"})


class AttributePath(NamedTuple):
    """An attribute of a module, or an item of a container in it.

    Attributes:
        name: of the attribute.
        text: the name, with the key of the item after it: `kept['mask']`.
    """

    name: str
    text: str


class LayerState:
    """The attributes of a layer of torch, which are plain. O(attributes)."""

    __slots__ = ("_attributes", "_count", "_module", "_weights")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._count = len(module.__dict__)
        self._attributes = plain_attributes(module)
        # The items of a list that `follow_weights` is about.
        self._weights = tuple(cast(Any, module)._flat_weights) if weights_of(module) is not None else ()

    def difference(self) -> str | None:
        """Return the name of an attribute that is not what it was; None where there is none."""
        for name, before, now in self.assigned():
            if _is_other(now, before):
                return name
        if self._has_other_weights():  # an item was set
            return "_flat_weights"
        self._count = len(self._module.__dict__)  # with what the trace lays over it
        return None

    def assigned(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, value before and value now of the plain attributes that hold another object: `differences`."""
        state, attributes = self._module.__dict__, self._attributes
        values = map(state.get, attributes, repeat(NO_VALUE))
        if len(state) == self._count and all(map(is_, values, attributes.values())):  # mostly
            return
        for name, before, now in differences(attributes, state):
            if name not in _NOT_RESTORED and not (name in OF_WEIGHTS and follow_weights(self._module)):
                yield name, before, now

    def are_put_back(self) -> bool:
        """Say whether attributes are others only where they held what stands for a tensor, and hold that again."""
        return all(_stands_for(before, now) for _, before, now in self.assigned())

    def restore(self) -> None:
        """Put the attributes back."""
        state = self._module.__dict__
        for name, before, _ in self.assigned():
            if before is NO_VALUE:
                del state[name]
            else:
                state[name] = before
        if self._has_other_weights():
            cast(Any, self._module)._flat_weights[:] = self._weights

    def _has_other_weights(self) -> bool:
        layer: Any = self._module
        is_same = not self._weights or all(map(is_, self._weights, layer._flat_weights))
        return not is_same and not follow_weights(layer)


class ModuleState(LayerState):
    """The plain attributes of one module, what the lists, dicts, sets and objects among them hold, and its buffers.

    Built when the trace first enters the module. Values of tensors are not copied. O(attributes).
    """

    __slots__ = ("_buffers", "_generators", "_items")

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._buffers = dict(module._buffers)
        # Random generators of the model's own, with what leads back to their state.
        self._generators = [(value, _state_of(value)) for value in self._attributes.values() if _is_generator(value)]
        # With the name of the attribute that leads there.
        self._items = [
            (name, container, copy_of(container))
            for name, value in self._attributes.items()
            if type(value) not in PLAIN_TYPES
            for container in containers_in((value,), DEPTH_IN_MODULES)
        ]

    def rebound_buffers(self, is_of_trace: Callable[[Any], bool]) -> dict[str, Any]:
        """Return the buffers that are another object now, one for which `is_of_trace` holds."""
        return {
            name: value
            for name, value in self._module._buffers.items()
            if value is not self._buffers.get(name) and is_of_trace(value)
        }

    def buffer(self, name: str) -> Any:
        """Return the buffer of that name as it was."""
        return self._buffers.get(name)

    def changed_values(self) -> list[tuple[str, Any]]:
        """Return the attributes that had a number, a string or None before and have another one now.

        Each with its name and what holds it. The name has the key where that is a dict or the attributes of an object:
        `config.problem_type`.
        """
        state = self._module.__dict__
        found: list[tuple[str, Any]] = [
            (name, state) for name, before, now in self.assigned() if _is_changed(before, now)
        ]
        for name, container, items in self._items:
            keys = [key for key, before, now in _replaced(items, container) if _is_changed(before, now)]
            if isinstance(items, dict):
                found += [(f"{name}.{key}", container) for key in keys]
            elif keys:
                found.append((name, container))
        return found

    def containers(self) -> list[tuple[str, Any]]:
        """Return the lists, dicts, sets and attributes of objects that the attributes lead to, with their names."""
        return [(name, container) for name, container, _ in self._items]

    def new_attributes(self) -> list[str]:
        """Return the names of the attributes with plain values, lists, dicts or sets that were not there before."""
        return [name for name, before, now in self.assigned() if before is NO_VALUE and type(now) in _KEPT]

    def grown_containers(self) -> list[tuple[str, list[Any]]]:
        """Return name and added values of the lists, dicts and sets that have another number of items than before.

        Of a dict from which items were removed the dict itself, as of a list or set.
        """
        found: list[tuple[str, list[Any]]] = []
        for name, container, items in self._items:
            if len(container) != len(items):
                only_grew = isinstance(items, dict) and all(key in container for key in items)
                added = [container[key] for key in container if key not in items] if only_grew else [container]
                found.append((name, added))
        return found

    def put_back_aliases(self) -> None:
        """Put back the buffers and tensors among the attributes in whose place there is another name of the same."""
        module: Any = self._module
        for held, known in ((module._buffers, self._buffers), (module.__dict__, self._attributes)):
            for name, before in known.items() if isinstance(held, dict) else ():  # a scripted module has another kind
                now = held.get(name)
                if now is not before and isinstance(before, torch.Tensor) and is_alias(now, before):
                    held[name] = before

    def assigned_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return name and tensor of the plain attributes that hold another value than before, or a list of such."""
        return [(name, tensor) for name, _, now in self.assigned() for tensor in _tensors_in(now)]

    def assigned_values(self) -> list[tuple[AttributePath, Any]]:
        """Return place and value of the plain attributes, and of items of containers, that are others than before.

        Those of a tuple or list that was assigned are named one by one.
        """
        return [(place, item) for place, value in self._changed() for item in _items_of(value)]

    def assigned_constants(self) -> Iterator[AttributePath]:
        """Yield place and value of what holds other things than before that are no tensors: `mode = 'fast'`."""
        for (name, text), value in self._changed():
            items = _items_of(value)
            if not any(isinstance(item, (torch.Tensor, TracedNumber)) for item in items):
                yield AttributePath(name, f"{text} = {', '.join(map(_described, items[:LARGE]))}")

    def _changed(self) -> Iterator[tuple[AttributePath, Any]]:
        yield from ((AttributePath(name, name), now) for name, _, now in self.assigned() if now is not NO_VALUE)
        for name, container, items in self._items:
            if not has_items(container, items):
                yield from _changed_items(name, container, items)

    def assigned_numbers(self) -> list[str]:
        """Return the names of plain attributes with a number before, and now one of another kind, such as a size."""
        return [
            name
            for name, before, now in self.assigned()
            if type(before) in (int, float) and isinstance(now, (int, float)) and type(now) not in PLAIN_TYPES
        ]

    def plain_values_put(self) -> Iterator[tuple[str, Any]]:
        """Yield the containers in which there are other plain values than before, with the attribute that leads there.

        A number, a text, None, or a tuple of such. Equal numbers that were computed anew are others, too.
        """
        for name, container, items in self._items:
            changed = () if has_items(container, items) else differences(items_by_key(items), items_by_key(container))
            if any(is_plain_value(item) for _, _, item in changed):
                yield name, container

    def had(self, name: str) -> bool:
        """Say whether there was a plain attribute of that name."""
        return name in self._attributes

    def replaced_items(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that replaced an item of a container, with the attribute that leads there."""
        return [
            (name, now)
            for name, container, items in self._items
            for _, _, now in _replaced(items, container)
            if isinstance(now, torch.Tensor)
        ]

    def difference(self) -> str | None:
        """Return the name of an attribute or buffer that is not what it was; None where there is none."""
        name = super().difference()
        if name is not None:
            return name
        for name, buffer in self._module._buffers.items():
            if buffer is not self._buffers.get(name):
                return name
        return next((name for name, container, items in self._items if not has_items(container, items)), None)

    def drawn_generators(self) -> list[object]:
        """Return the generators of Python or numpy that forward has drawn from."""
        return [value for value, state in self._generators if repr(_state_of(value)) != repr(state)]

    def restore(self) -> None:
        """Put plain attributes and their items back, and buffers."""
        super().restore()
        for _, container, items in self._items:
            refill(container, items)
        for generator, known in self._generators:
            if isinstance(generator, random.Random):
                generator.setstate(known)
            else:
                generator.bit_generator.state = known
        for name in self.rebound_buffers(lambda value: True):
            if name in self._buffers:
                self._module._buffers[name] = self._buffers[name]
            else:
                del self._module._buffers[name]


def parts_of(module: nn.Module) -> Parts:
    """Return the parameters and submodules of a module, and the buffers of a layer of torch. O(parts)."""
    state = module.__dict__
    names = _LAYER_PARTS if is_torch_layer(type(module)) else _PARTS
    # A scripted module holds them elsewhere.
    held = ((name, state[name]) for name in names if isinstance(state.get(name), dict))
    return [(name, tuple(parts), tuple(parts.values())) if parts else _EMPTY[name] for name, parts in held]


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are its own: neither what nn.Module keeps, nor what a trace sets."""
    return {name: value for name, value in module.__dict__.items() if name not in _NOT_RESTORED}


def replaced_part(module: nn.Module, before: Parts) -> str | None:
    """Return the name of one of `parts_of(module)` that is not what it was, is gone or is new; None where all are."""
    state = module.__dict__
    for name, names, parts in before:
        held = state[name]
        if len(held) != len(parts) or (parts and not all(map(is_, held.values(), parts))):
            known = dict(zip(names, parts, strict=True))
            return next((each for each, _, _ in differences(held, known)), None)  # None where another order is all
    return None


def are_put_back(module: nn.Module, before: Parts) -> bool:
    """Say whether the parts of a module are others only where it held what stands for a tensor, and has that again."""
    for name, names, parts in before:
        held = module.__dict__[name]
        if tuple(held) != tuple(names):
            return False
        pairs = [(part, now) for part, now in zip(parts, held.values(), strict=True) if part is not now]
        if not all(_stands_for(part, now) for part, now in pairs):
            return False
    return True


def _stands_for(stand_in: Any, value: Any) -> bool:
    tensors = isinstance(stand_in, torch.Tensor) and isinstance(value, torch.Tensor)
    return tensors and stand_in.is_meta and not value.is_meta and stand_in.shape == value.shape


def put_back_parts(module: nn.Module, before: Parts) -> None:
    """Let a module have these parts again."""
    if replaced_part(module, before) is not None:
        for name, names, parts in before:
            held = module.__dict__[name]
            held.clear()
            held.update(zip(names, parts, strict=True))


def is_alias(value: Any, tensor: torch.Tensor) -> bool:
    """Say whether a value is a tensor with the memory and form of another one."""
    if not isinstance(value, torch.Tensor) or memory_of(value) != memory_of(tensor):
        return False
    form = (value.shape, value.dtype, value.layout)
    if form != (tensor.shape, tensor.dtype, tensor.layout) or value.layout != torch.strided:
        return False
    return (value.stride(), int(value.storage_offset())) == (tensor.stride(), int(tensor.storage_offset()))


def holds_plain_values(container: Any) -> bool:
    """Say whether a number, a text, None, or a tuple of such is in a list, dict or set."""
    return any(map(is_plain_value, items_by_key(container).values()))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [item for item in cast(list[Any], value) if isinstance(item, torch.Tensor)]
    return [value] if isinstance(value, torch.Tensor) else []


def _items_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast(dict[Any, Any], value).values())
    return list(cast(list[Any], value)) if isinstance(value, (list, tuple, set, deque)) else [value]


def _changed_items(name: str, container: Any, before: Any) -> Iterator[tuple[AttributePath, Any]]:
    """Yield the items of a container that are others than before, or new, and None for those that are gone."""
    if isinstance(container, (set, frozenset)):
        yield AttributePath(name, name), container
        return
    for key, _, now in differences(items_by_key(before), items_by_key(container)):
        text = f"{name}[{key!r}]" if type(key) in PLAIN_TYPES else name
        yield AttributePath(name, text), None if now is NO_VALUE else now


def _replaced(before: Any, container: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield key, value before and value now of the items of a container in whose place there is another one."""
    if has_items(container, before):
        return
    for key, then, now in differences(items_by_key(before), items_by_key(container)):
        if then is not NO_VALUE and now is not NO_VALUE:
            yield key, then, now


def _is_other(now: Any, before: Any) -> bool:
    """Say whether an object has another value than an earlier one: plain values are compared, all others differ."""
    return type(before) not in PLAIN_TYPES or type(now) is not type(before) or now != before


def _described(value: Any) -> str:
    """Return an object that is no tensor as a text, the same for two that hold the same."""
    if type(value) in PLAIN_TYPES or isinstance(value, (Enum, torch.dtype, torch.device)):
        return repr(value)
    return getattr(value, "__qualname__", None) or str(PythonState().of(value))


def _is_changed(before: object, now: object) -> bool:
    """Say whether a plain value has another one in its place, or none."""
    now = None if now is NO_VALUE else now
    return type(before) in PLAIN_TYPES and type(now) in PLAIN_TYPES and now != before


def _is_generator(value: object) -> bool:
    return isinstance(value, random.Random) or hasattr(type(value), "bit_generator")


def _state_of(generator: Any) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state
