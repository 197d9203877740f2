"""Results: follow what the calls of a model give, with its parts."""

from __future__ import annotations

import dataclasses
import enum
import operator
import types
from types import FrameType
from typing import Any, cast

import torch

from featx.ir.node import Node
from featx.rebuilding import attributes_beside_items, attributes_of, rebuild_tuple
from featx.tracing.guards.forms import attributes_given_to, holds_tensors
from featx.tracing.guards.scalars import plain_number, plain_numbers
from featx.tracing.history.lineage import Origin, Part, source_node
from featx.tracing.objects.followed_tuple import FollowedTuple
from featx.tracing.objects.structure import Path, contents_of, is_structure, parts_of, text_of
from featx.tracing.recording.counted_size import CountedSize
from featx.tracing.recording.recorder import Recorder
from featx.tracing.source.frames import calls_directly, is_library_code
from featx.tracing.source_uses.syntax_queries import (
    AttributeRead,
    Step,
    Unpacking,
    only_takes_items,
    unpacked_count,
    what_follows,
)


@dataclasses.dataclass(frozen=True, slots=True)
class ContentsSnapshot:
    """What a container or an object held when forward got it.

    Attributes:
        what: where it is from, for messages.
        container: the container or the object.
        before: what it held, by key, index or name.
        call: the node of the call that returned it, or something that holds it; None for inputs.
    """

    what: str
    container: Any
    before: dict[Any, Any]
    call: Node | None = None


# What is the same object wherever it comes from.
_SHARED = (type, enum.Enum, torch.nn.Module, slice, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)

_SEQUENCES = (tuple, list, FollowedTuple)


def _gets_items(frame: FrameType, call: Node) -> bool:
    """Say whether the code at `frame` gets what a call returns, and does nothing but take items of it."""
    target = call.target
    name = target if isinstance(target, str) else getattr(target, "__name__", None)
    is_function = call.op in ("call_function", "call_method") and name is not None
    return is_function and only_takes_items(frame, name) and calls_directly(frame)


class _TakenItems:
    """Makes a node each time that code takes an item of a followed tuple, as a symbolic trace does.

    Args:
        recorder: makes the nodes.
        node: the call that has returned the tuple.
        parts: its items.
    """

    def __init__(self, recorder: Recorder, node: Node, parts: list[Part]) -> None:
        self._recorder = recorder
        self._node = node
        self._parts = parts

    def on_item(self, key: Any, item: Any, frame: FrameType) -> Any:
        """Make a node of an item, or of the tuple that a slice gives."""
        if not self._is_of_model(frame):
            return item
        if isinstance(key, slice):
            self._add(plain_numbers(key))
            if not only_takes_items(frame, None):
                return item
            followed = FollowedTuple(item)
            followed.taker = _TakenItems(self._recorder, self._node, self._parts[key])
            return followed
        self._take(self._parts[key])
        return item

    def on_iteration(self, frame: FrameType) -> None:
        """Make nodes of all items where code unpacks the tuple: `a, b = items`."""
        if self._is_of_model(frame) and unpacked_count(frame) == len(self._parts):
            for part in self._parts:
                self._take(part)

    def _take(self, part: Part) -> None:
        if part.node is None or part.node.is_erased:
            self._recorder.node_of(part)
        else:  # only its name is of use
            self._add(part.key)

    def _add(self, key: Any) -> None:
        self._recorder.add_node("call_function", operator.getitem, (self._node, key), {}, None, None)

    def _is_of_model(self, frame: FrameType) -> bool:
        return self._recorder.numbers.is_recording() and not is_library_code(frame.f_code)


class Results:
    """Notes where values come from, so that `recorder` knows them when they become arguments."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        # The objects that calls gave, and what they held then.
        self.objects: list[ContentsSnapshot] = []
        # The attributes of their own that tensors had when calls that are one node returned them, by id.
        self.attributes_given: dict[int, frozenset[str]] = {}
        # The attributes of objects that have been replaced: the object may be of the model, and outlive the trace.
        self._replaced: list[tuple[Any, str, Any]] = []

    def restore_objects(self) -> None:
        """Give objects that calls gave their own numbers back."""
        self._restore_since(0)

    def _restore_since(self, place: int) -> None:
        for value, name, item in reversed(self._replaced[place:]):
            object.__setattr__(value, name, item)
        del self._replaced[place:]

    def mark(self) -> tuple[int, int]:
        """Return what `forget` needs to take back everything from now on."""
        return len(self.objects), len(self._replaced)

    def forget(self, mark: tuple[int, int]) -> None:
        """Take back what was noted since `mark`: objects get their own numbers back."""
        objects, replaced = mark
        del self.objects[objects:]
        self._restore_since(replaced)

    def follow(self, value: Any, origin: Origin, frame: FrameType | None) -> Any:
        """Return the value of `origin` so that whatever is done with it, or with a part of it, is followed.

        Args:
            value: what a call returned. Lists and dicts are changed.
            origin: the node of the call.
            frame: the code that gets it, where the order in which that takes parts counts in names.
        """
        recorder = self._recorder
        if isinstance(value, torch.Tensor):
            recorder.lineage.put(value, origin)
            recorder.earlier.forget(value)
            recorder.write_log.note_memory(value)
            if isinstance(origin, Node):
                recorder.note_form(origin, value)
            return value
        if value is None:
            return value
        if isinstance(value, (bool, str, torch.dtype, torch.layout)):
            recorder.guards.add(recorder.node_of(origin), value, "an answer")
            return value
        if isinstance(value, (int, float)):
            recorder.numbers.sizes_were_read = True
            return recorder.numbers.new(plain_number(value), origin)
        if isinstance(value, torch.device):
            recorder.lineage.put(value, origin)
            return value
        if isinstance(value, torch.Size):
            return self._size(value, origin, frame)
        if isinstance(origin, Node):
            _describe_parts(origin, value)
        if isinstance(value, (tuple, list, dict)):
            self._follow_attributes(attributes_beside_items(value), origin)
        if isinstance(value, (tuple, list)):
            return self._items(cast(tuple[Any, ...], value), origin, frame)
        if isinstance(value, dict):
            for key, item in list(cast(dict[Any, Any], value).items()):
                followed = self.follow(item, Part(origin, operator.getitem, key), None)
                if followed is not item:
                    value[key] = followed
            return value
        return self._object(value, origin)

    def _size(self, size: torch.Size, origin: Origin, frame: FrameType | None) -> torch.Size | CountedSize:
        recorder = self._recorder
        parts = [Part(origin, operator.getitem, index) for index in range(len(size))]
        numbers = recorder.numbers.new_sizes(list(size), parts)
        followed = torch.Size(numbers)
        recorder.lineage.put(followed, origin)
        if frame is not None:
            steps = what_follows(frame)
            if AttributeRead("numel") in steps:
                return CountedSize.of(numbers, origin, recorder)
            if steps and isinstance(steps[0], slice):
                # A symbolic trace has a node for the slice, which counts in names.
                recorder.names.skip(recorder.scope.module_path, "getitem")
                taken = parts[steps[0]]
                self._make_taken(steps[1:], taken)
            else:
                self._make_taken(steps, parts)
        return followed

    def _items(self, items: Any, origin: Origin, frame: FrameType | None) -> Any:
        parts = [Part(origin, operator.getitem, index) for index in range(len(items))]
        steps = what_follows(frame) if frame is not None else []
        followed = [self.follow(item, part, None) for item, part in zip(items, parts, strict=True)]
        if type(items) is tuple and isinstance(origin, Node) and frame is not None and _gets_items(frame, origin):
            is_unpacked = steps[:1] == [Unpacking(len(parts))]
            items = FollowedTuple(followed)
            items.taker = _TakenItems(self._recorder, origin, parts)
        else:
            is_unpacked = self._make_taken(steps, parts)
            if isinstance(items, list):
                items[:] = followed
            elif not all(map(operator.is_, items, followed)) and not hasattr(type(items), "n_sequence_fields"):
                items = rebuild_tuple(type(items), followed, attributes_of(items))
        if isinstance(origin, Node) and origin.op != "call_module" and type(items) in _SEQUENCES:
            self._check_length(origin, len(items), is_unpacked=is_unpacked)
        return items

    def _check_length(self, origin: Node, length: int, *, is_unpacked: bool) -> None:
        """Note how many tensors a call gives, which depends on a size, mostly, and on which code may depend."""
        if is_unpacked:  # into so many names, or the model raises: as traces at other sizes show
            origin.meta["unpacked_into"] = length
            self._recorder.numbers.sizes_were_read = True
            return
        node = self._recorder.add_unnamed_node("call_function", len, (origin,), {}, None)
        self._recorder.guards.add(node, length, "how many tensors a call gives")

    def _make_taken(self, steps: list[Step], parts: list[Part]) -> bool:
        """Make nodes of the parts that the code takes at once, in the order in which a symbolic trace makes them."""
        first = steps[0] if steps else None
        if first == Unpacking(len(parts)):
            for part in parts:
                self._recorder.node_of(part)
            return True
        if isinstance(first, int) and -len(parts) <= first < len(parts):
            self._recorder.node_of(parts[first])
            return True
        return False

    def follow_attributes(self, value: Any, origin: Origin) -> None:
        """Follow what the tensors in the result of a call that is one node have as attributes of their own."""
        for tensor, path in parts_of(value):
            if isinstance(tensor, torch.Tensor):
                of_tensor = origin
                for step in path:
                    of_tensor = Part(of_tensor, *step)
                given = attributes_given_to(tensor)
                if given:
                    self.attributes_given[id(tensor)] = frozenset(given)
                self._follow_attributes(given, of_tensor)

    def _follow_attributes(self, attributes: dict[str, Any], origin: Origin) -> None:
        for name, item in list(attributes.items()):
            if isinstance(item, torch.Tensor) or is_structure(item):
                self._object(item, Part(origin, getattr, name))

    def _object(self, value: Any, origin: Origin) -> Any:
        if isinstance(value, _SHARED):
            return value
        lineage = self._recorder.lineage
        origins: dict[Path, Origin] = {(): origin}
        for part, path in parts_of(value):
            if path:
                origins[path] = Part(origins[path[:-1]], *path[-1])
            if holds_tensors(part):
                for name, item in attributes_of(part).items():
                    followed = self._with_numbers(item, Part(origins[path], getattr, name))
                    if followed is not item:
                        self._replaced.append((part, name, item))
                        object.__setattr__(part, name, followed)
            if isinstance(part, torch.Tensor):
                self._tensor_of_object(part, origins[path])
            elif not isinstance(part, (tuple, list, dict)) and (is_structure(part) or part is value):
                lineage.put(part, origins[path])
            if is_structure(part):
                call = source_node(origin)
                what = f"an object that '{call.name}' gave"
                self.objects.append(ContentsSnapshot(what, part, contents_of(part), call))
        return value

    def _with_numbers(self, value: Any, origin: Origin) -> Any:
        """Return a copy of a number, or of a tuple or list of such, that is followed; other values as they are."""
        if type(value) in (int, float):
            self._recorder.numbers.sizes_were_read = True
            return self._recorder.numbers.new(value, origin)
        if type(value) not in (tuple, list):
            return value
        items = [self._with_numbers(item, Part(origin, operator.getitem, index)) for index, item in enumerate(value)]
        return value if all(map(operator.is_, items, value)) else type(value)(items)

    def _tensor_of_object(self, tensor: torch.Tensor, origin: Origin) -> None:
        recorder = self._recorder
        if recorder.lineage.get(tensor) is None and id(tensor) not in recorder.owned:
            self.follow(tensor, origin, None)
            return
        # Which of the two the code uses from now on cannot be observed, so they must stay one.
        both = recorder.unnamed_node_of(origin), recorder.create_unnamed_arg(tensor)
        same = recorder.add_unnamed_node("call_function", operator.is_, both, {})
        recorder.guards.add(same, True, "whether a tensor in what a call gives is one that the model had")


def _describe_parts(node: Node, value: Any) -> None:
    """Note the forms of the tensors inside the container or object that a node gave."""
    node.meta["parts"] = {
        text_of(path): (part.shape, part.dtype)
        for part, path in parts_of(value)
        if isinstance(part, torch.Tensor) and not part.is_nested
    }
