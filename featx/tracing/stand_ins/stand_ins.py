"""Run torch functions on tensors that have a form and no values, in place of the real ones.

Weights, buffers and inputs each get a stand-in on the meta device, once. What is computed from constants alone runs for
real, because a model may ask for its values; it gets a stand-in when it meets one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from featx.ir.operator_effects import operator_draws, operator_writes
from featx.tracing.guards.scalars import TracedFloat, TracedInt, plain_numbers
from featx.tracing.stand_ins.function_shapes import result_of

_META = torch.device("meta")
_NUMBERS = (TracedInt, TracedFloat)
# Moves that stay where they are: on the meta device they would fail, or make a real tensor without values.
_MOVES = frozenset({"cpu", "cuda", "xpu"})


class StandIns:
    """The stand-ins of one trace. `owned` are the tensors of the model, by id."""

    def __init__(self, owned: dict[int, str]) -> None:
        self._owned = owned
        # By id: the real tensor, which must stay alive, and what stands for it.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._twins_of_owned: set[int] = set()
        # The dtype that the model is taken to be of, and the ids of its tensors that would be of it.
        self._cast: torch.dtype | None = None
        self._cast_ids: set[int] = set()

    def cast(self, root: nn.Module, dtype: torch.dtype) -> None:
        """Let stand-ins for floating-point parameters and buffers of `root` be as after `root.to(dtype)`."""
        self._cast = dtype
        for module in root.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.is_floating_point():
                    self._cast_ids.add(id(tensor))

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
        if known is None:
            known = self._made[id(tensor)] = (tensor, self.new(tensor))
            if id(tensor) in self._owned:
                self._twins_of_owned.add(id(known[1]))
        return known[1]

    def new(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another stand-in for a tensor that has, or may have, one."""
        dtype = self.dtype_of(tensor)
        if tensor.layout != torch.strided:
            return tensor.detach().to(_META, dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_META)

    def is_stand_in_of(self, value: object, tensor: object) -> bool:
        """Say whether `value` is the stand-in that was made for `tensor`."""
        known = self._made.get(id(tensor))
        return known is not None and known[1] is value

    def stood_for(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the stand-ins of the model's tensors with those tensors, by the ids of the stand-ins."""
        return {id(twin): (twin, real) for real, twin in self._made.values() if id(real) in self._owned}

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `function` gives, on stand-ins if any tensor or traced number is involved."""
        name = function.__name__
        if not (self._has_form_only(args) or (kwargs and self._has_form_only(tuple(kwargs.values())))):
            if not operator_draws(name):
                return function(*args, **kwargs)
            with _META:
                return function(*args, **{**kwargs, "device": _META} if "device" in kwargs else kwargs)
        args, kwargs = plain_numbers((args, kwargs))
        if self.is_cast:  # ahead of the rules, which ask for dtypes
            args, kwargs = self._convert(args), {key: self._convert(value) for key, value in kwargs.items()}
        result = result_of(function, args, kwargs)
        if result is not None:
            return self.of(result)
        if name in _MOVES:
            return self.of(args[0])
        args = tuple([self._convert(value) for value in args])
        if kwargs:
            kwargs = {key: self._convert(value) for key, value in kwargs.items()}
            if kwargs.get("device") is not None:
                kwargs["device"] = _META
        if name == "to" and len(args) > 1 and isinstance(args[1], (str, int)):
            args = (args[0], _META, *args[2:])
        if any(isinstance(value, torch.Tensor) for value in args[:1]):
            return function(*args, **kwargs)
        with _META:  # a factory with a traced size
            return function(*args, **kwargs)

    def writes_model(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether a call writes into a tensor of the model."""
        name = function.__name__
        if name in ("batch_norm", "instance_norm"):
            return any(id(value) in self._owned for value in (*args[1:5], *kwargs.values()))
        if operator_writes(name) or "out" in kwargs:
            targets = (*args[:1], kwargs.get("out"))
            return any(id(target) in self._owned or self._stands_for_owned(target) for target in targets)
        return False

    def _stands_for_owned(self, value: object) -> bool:
        return id(value) in self._twins_of_owned

    def _has_form_only(self, values: tuple[Any, ...]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.is_meta or id(value) in self._owned or id(value) in self._made:
                    return True
            elif isinstance(value, _NUMBERS):
                if value.trace.is_recording():
                    return True
            else:
                parts = (value.start, value.stop, value.step) if isinstance(value, slice) else value
                if isinstance(parts, (tuple, list)) and self._has_form_only(tuple(parts)):
                    return True
        return False

    def _convert(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value)
        kind = type(value)
        if kind is torch.device:
            return _META
        if kind is tuple or kind is list:
            return kind([self._convert(item) for item in value])
        return value
