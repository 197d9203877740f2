"""Run torch functions on tensors that have a form and no values, in place of the real ones.

Weights, buffers and inputs each get a stand-in on the meta device, once. Small inputs, such as masks, token ids and
boxes, keep their values. What is computed from small inputs, sizes and constants alone runs for real, because a model
may ask for its values; it gets a stand-in when it meets one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from featx.ir.memory import memory_of
from featx.ir.operator_facts import draws_now, facts_of, first_argument, targets_of_write, tensors_written
from featx.tracing.guards.scalars import TracedNumber, plain_numbers
from featx.tracing.objects.module_parts import registered_tensors
from featx.tracing.signals import NeedsRealValues
from featx.tracing.stand_ins.dynamic_shapes import DynamicShapes
from featx.tracing.stand_ins.known_results import KnownResults, key_of_call
from featx.tracing.stand_ins.recurrent import form_of_recurrent, is_recurrent
from featx.tree import tensors_in, tree_leaves

# From a tensor to what stands for it.
Twin = Callable[[torch.Tensor], torch.Tensor]
_META = torch.device("meta")

# How many elements a tensor may have whose values are known.
_SMALL = 1 << 16
_SMALL_OF_FLOATS = 1 << 11
# What is the same for stand-ins.
_WITHOUT_TENSORS = frozenset({bool, int, float, str, type(None), torch.dtype})
# Moves that stay where they are: on the meta device they would fail, or make a real tensor without values.
_MOVES = frozenset({"cpu", "cuda", "xpu"})
# Functions that fill a tensor with a number, which they take out of a tensor too. The form is the same for each number.
_FILLS = frozenset({"full", "full_like", "new_full"})


class StandIns:
    """The stand-ins of one trace.

    Args:
        owned: the tensors of the model, by id.
        results: what calls on stand-ins are known to return.

    Attributes:
        shapes: the shapes that depend on values, as an earlier run with values has found them.
    """

    def __init__(self, owned: dict[int, str], results: KnownResults) -> None:
        self._results = results
        self.shapes = DynamicShapes()
        self._owned = owned
        # By id: the real tensor, which must stay alive, and what stands for it.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # The memory of the tensors of the model, and of what stands for them.
        self._memories_of_owned: set[int] = set()
        # Small inputs and what was computed from their values, by id.
        self._known: dict[int, torch.Tensor] = {}
        # Real tensors that were written through their stand-ins, so that their values are others, by their memory.
        self._outdated: dict[int, torch.Tensor] = {}
        # The dtype that the model is taken to be of, and the ids of its tensors that would be of it.
        self._cast: torch.dtype | None = None
        self._cast_ids: set[int] = set()

    def cast(self, root: nn.Module, dtype: torch.dtype) -> None:
        """Let stand-ins for floating-point parameters and buffers of `root` be as after `root.to(dtype)`."""
        self._cast = dtype
        self._cast_ids = {id(tensor) for _, tensor in registered_tensors(root) if tensor.is_floating_point()}

    @property
    def is_cast(self) -> bool:
        """Whether the model is taken to be of another dtype than it is."""
        return self._cast is not None

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype of a tensor of the model, or of any other."""
        return self._cast if self._cast is not None and id(tensor) in self._cast_ids else tensor.dtype

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a tensor: same shape, strides and dtype, on the meta device."""
        if tensor.is_meta and id(tensor) not in self._owned:
            return tensor
        known = self._made.get(id(tensor))
        if known is None or not _has_form_of(known[1], tensor):
            known = self._made[id(tensor)] = (tensor, self.new(tensor))
            if id(tensor) in self._owned:
                self._memories_of_owned |= {memory_of(tensor), memory_of(known[1])}
        return known[1]

    def made_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the stand-in of a tensor if there is one."""
        known = self._made.get(id(tensor))
        return None if known is None else known[1]

    def version_of(self, tensor: torch.Tensor) -> int:
        """Return a number that changes where a tensor is written, itself or through its stand-in."""
        twin = self.made_for(tensor)
        return tensor._version + (0 if twin is None or twin is tensor else twin._version)

    def new(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another stand-in for a tensor that has, or may have, one."""
        dtype = self.dtype_of(tensor)
        if tensor.layout != torch.strided:
            return tensor.detach().to(_META, dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_META)

    def of_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for an input: a copy of a small one, else a stand-in."""
        if not keeps_values(tensor):
            return self.new(tensor)
        found = copy_of_input(tensor)
        self._known[id(found)] = found
        return found

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Say whether the values of a tensor of the trace are known."""
        if tensor.is_meta or id(tensor) in self._owned:
            return False
        return not self._outdated or memory_of(tensor) not in self._outdated

    def is_stand_in_of(self, value: object, tensor: object) -> bool:
        """Say whether `value` is the stand-in that was made for `tensor`."""
        known = self._made.get(id(tensor))
        return known is not None and known[1] is value

    def stand_ins_of_model(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the stand-ins of the model's tensors with those tensors, by the ids of the stand-ins."""
        return {id(twin): (twin, real) for real, twin in self._made.values() if id(real) in self._owned}

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, may_draw: bool = False
    ) -> Any:
        """Return what `function` gives, on stand-ins if the values of a tensor are not known, or would be many.

        Random numbers are not known either, unless it `may_draw` them.

        Raises:
            NeedsRealValues: the form of the result depends on values of inputs.
        """
        name = function.__name__
        given = (*args, *kwargs.values()) if kwargs else args
        draws = draws_now(name, args, kwargs)
        if not self._has_form_only(given) and (may_draw or not draws):
            is_of_sizes = self._has_numbers(given)
            is_of_values = draws or any(id(leaf) in self._known for leaf in tree_leaves(given))
            args, kwargs = plain_numbers((args, kwargs))
            if not is_of_sizes and not is_of_values:
                return function(*args, **kwargs)
            return self._run_on_values(function, args, kwargs, is_of_values=is_of_values)
        if facts_of(name).writes_first or "out" in kwargs:
            self._note_outdated(targets_of_write(args, kwargs))
        args, kwargs = plain_numbers(args), plain_numbers(kwargs) if kwargs else kwargs
        if self.is_cast:  # before the question what is known, which is by dtypes
            args, kwargs = self._convert(args, self.of), self._convert(kwargs, self.of)
        key = self._key_of(function, args, kwargs)
        result = None if key is None else self._results.get(key)
        if result is not None:
            return result
        twins = [(value, self.of(value)) for value in self._with_values(given)]
        versions = [twin._version for _, twin in twins]
        inputs = [self.of(leaf) for leaf in tensors_in((args, kwargs))]
        run = partial(self._run_on, self.of, function, args, kwargs)
        result = self._results.run(key, run, inputs, self.shapes.note_place())
        written = [value for (value, twin), version in zip(twins, versions, strict=True) if twin._version != version]
        self._note_outdated(written)
        return self._written_target(result, targets_of_write(args, kwargs))

    def _written_target(self, result: Any, targets: tuple[Any, ...]) -> Any:
        """Return the target that a call has written and returned, where `result` is the stand-in of it."""
        made = [target for target in targets if isinstance(target, torch.Tensor) and id(target) not in self._owned]
        return next((target for target in made if self.is_stand_in_of(result, target)), result)

    def _run_on(
        self, twin_of: Twin, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return self._run_on_twins(twin_of, function, args, kwargs)
        except RuntimeError:
            plain_args, plain_kwargs = self._with_plain_lengths((args[1:], kwargs))
            if not any(map(operator.is_not, tree_leaves((args[1:], kwargs)), tree_leaves((plain_args, plain_kwargs)))):
                raise
        return self._run_on_twins(twin_of, function, (*args[:1], *plain_args), plain_kwargs)

    def _run_on_twins(
        self, twin_of: Twin, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name = function.__name__
        if name in _MOVES:
            return twin_of(args[0])
        args = tuple(
            [self._convert(value, twin_of) if type(value) not in _WITHOUT_TENSORS else value for value in args]
        )
        kwargs = self._convert(kwargs, twin_of) if kwargs else kwargs
        if name == "to" and len(args) > 1 and isinstance(args[1], (str, int)):
            args = (args[0], _META, *args[2:])
        if is_recurrent(function, args, kwargs):
            return form_of_recurrent(function, args)
        if name in _FILLS:
            args, kwargs = _with_plain_fill(args, kwargs)
        if isinstance(first_argument(args, kwargs), torch.Tensor):
            return function(*args, **kwargs)
        with _META:  # a factory
            return function(*args, **kwargs)

    def _with_plain_lengths(self, value: Any) -> Any:
        """Return an argument with numbers in place of the integer tensors of one element whose values are known.

        `x.split([n, m])`, say, takes such tensors for lengths, which have no values on the meta device.
        """
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._with_plain_lengths(item) for item in value])
        if kind is dict:
            return {key: self._with_plain_lengths(item) for key, item in value.items()}
        if kind is torch.Tensor and value.dim() == 0 and self.has_values(value):
            is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
            return value.item() if is_integer else value
        return value

    def _run_on_values(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_of_values: bool
    ) -> Any:
        if facts_of(function.__name__).reads_values:
            return function(*args, **kwargs)
        try:
            form = self._form_of_result(function, args, kwargs)
        except Exception:
            if is_of_values:
                raise NeedsRealValues from None
            return function(*args, **kwargs)  # which fails too, and says why
        forms = tensors_in(form)
        if any(leaf.numel() > _SMALL for leaf in forms):
            return form
        result = function(*args, **kwargs)
        leaves = tensors_in(result)
        if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in forms]:
            raise NeedsRealValues
        if is_of_values:
            self._known.update((id(leaf), leaf) for leaf in leaves)
        return result

    def _form_of_result(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call gives on stand-ins of its own, which writes nothing of the trace."""
        key = self._key_of(function, args, kwargs)
        form = None if key is None else self._results.get(key)
        if form is not None:
            return form
        tensors = tensors_in((args, kwargs))
        twins = {id(tensor): self.new(tensor) for tensor in tensors}
        with self.shapes.peeking():
            run = partial(self._run_on, lambda tensor: twins[id(tensor)], function, args, kwargs)
            return self._results.run(key, run, list(twins.values()), self.shapes.note_place())

    def _key_of(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the result of a call is known by, in runs that take lengths from an earlier one or in others.

        In the former, a call that takes some must run each time, so that the next one takes those that are its own.
        """
        key = key_of_call(function, args, kwargs, self._owned)
        return (self.shapes.are_expected, *key) if key is not None else None

    def _with_values(self, values: Iterable[Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                if not value.is_meta and self.has_values(value):
                    found.append(value)
            elif isinstance(value, (tuple, list)):
                found += self._with_values(cast(list[Any], value))
        return found

    def _note_outdated(self, targets: Iterable[Any]) -> None:
        for target in targets:
            is_tensor = isinstance(target, torch.Tensor)
            if is_tensor and not target.is_meta and id(target) not in self._owned:  # again too, under another name
                self._outdated[memory_of(target)] = target
                torch.autograd.graph.increment_version(target)

    def written_of_model(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return the tensors of the model, or what stands for them and their views, into which a call writes."""
        return [target for target in tensors_written(function, args, kwargs) if self._is_of_model(target)]

    def _is_of_model(self, target: Any) -> bool:
        """Say whether a value is a tensor of the model, or a view of one."""
        is_view = isinstance(target, torch.Tensor) and memory_of(target) in self._memories_of_owned
        return is_view or id(target) in self._owned

    def _has_form_only(self, values: tuple[Any, ...]) -> bool:
        owned, outdated = self._owned, self._outdated
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.is_meta or id(value) in owned or (outdated and memory_of(value) in outdated):
                    return True
            elif isinstance(value, (tuple, list)) and self._has_form_only(tuple(value)):
                return True
        return False

    def _has_numbers(self, values: tuple[Any, ...]) -> bool:
        for value in values:
            if isinstance(value, TracedNumber):
                if value.trace.is_recording():
                    return True
            else:
                parts = (value.start, value.stop, value.step) if isinstance(value, slice) else value
                if isinstance(parts, (tuple, list)) and self._has_numbers(tuple(parts)):
                    return True
        return False

    def _convert(self, value: Any, twin_of: Twin) -> Any:
        if isinstance(value, torch.Tensor):
            return twin_of(value)
        kind = type(value)
        if kind is torch.device:
            return _META
        if kind is tuple or kind is list:
            return kind([self._convert(item, twin_of) for item in value])
        if kind is dict:
            converted = {key: self._convert(item, twin_of) for key, item in value.items()}
            return {**converted, "device": _META} if converted.get("device") is not None else converted
        return value


def _with_plain_fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call that fills with a number, with one of the same type in the place of a tensor."""

    def plain(value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.is_meta and value.numel() == 1
        return torch.zeros((), dtype=value.dtype, device="cpu").item() if is_number else value

    names = {name: plain(value) if name == "fill_value" else value for name, value in kwargs.items()}
    return tuple([plain(value) if place > 0 else value for place, value in enumerate(args)]), names


def keeps_values(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> bool:
    """Say whether an input, in another shape if one is given, is so small that its values are known in any trace."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    count = math.prod(tensor.shape if shape is None else shape)
    return count <= (_SMALL_OF_FLOATS if tensor.is_floating_point() else _SMALL)


def _has_form_of(twin: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Say whether a stand-in is still as the tensor is: `t_()` changes the shape of that in place."""
    return twin.layout != torch.strided or (twin.shape == tensor.shape and twin.stride() == tensor.stride())


def copy_of_input(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an input that requires a gradient, as a leaf or as none, if the input does: code may ask."""
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    if not tensor.requires_grad:
        return copied
    with torch.enable_grad():
        return copied.requires_grad_() if tensor.is_leaf else copied.requires_grad_().clone()
