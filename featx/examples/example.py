"""Inputs of a model, in the form in which it is called with them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from featx.errors import ArgumentTypeError
from featx.tree import tensors_in, tree_map

# How many elements a tensor has at least whose values are not kept.
_LARGE = 1 << 20
_OF_CONTAINERS = re.compile("dict|mapping|list|tuple|sequence|iterable|collection")


@dataclass(frozen=True)
class Example:
    """Inputs of a model.

    Attributes:
        args: positional ones.
        kwargs: those by name.
        source: where they come from, for messages: "the first Conv2d".
        is_for_one_mode: whether the other of train and eval mode takes other inputs.
        is_other_guess: whether they were guessed because the model does not run with the likeliest ones.
    """

    args: tuple[Any, ...]  # Any: models take anything
    kwargs: dict[str, Any]
    source: str
    is_for_one_mode: bool = False
    is_other_guess: bool = False

    def options(self) -> dict[str, Any]:
        """Return the inputs by name that hold no tensor, such as `use_cache=False`."""
        return {name: value for name, value in self.kwargs.items() if not tensors_in(value)}

    def with_options(self, options: Mapping[str, Any], forward: Callable[..., Any]) -> Example:
        """Return these inputs with those of `options` that are not among them."""
        if not options:
            return self
        given = self.kwargs.keys() | inspect.signature(forward).bind_partial(*self.args, **self.kwargs).arguments
        further = {name: value for name, value in options.items() if name not in given}
        return replace(self, kwargs={**further, **self.kwargs})

    def without(self, name: str, forward: Callable[..., Any]) -> Example:
        """Return these inputs without one that is given by name, if `forward` does without it too."""
        parameter = inspect.signature(forward).parameters.get(name)
        if name not in self.kwargs or parameter is None or parameter.default is parameter.empty:
            return self
        return replace(self, kwargs={key: value for key, value in self.kwargs.items() if key != name})

    def without_values(self) -> Example:
        """Return these inputs with tensors on the meta device in place of those of floating point."""
        args, kwargs = tree_map(_without_values, (self.args, self.kwargs))
        return Example(args, kwargs, self.source, self.is_for_one_mode)

    def with_values(self, device: torch.device) -> Example:
        """Return these inputs on a device, with random values in place of those of the meta device; integers are 0."""
        generator = torch.Generator().manual_seed(0)

        def with_values(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not leaf.is_meta:
                return leaf.to(device)
            if not leaf.is_floating_point():  # indices, which any table has
                return torch.zeros(leaf.shape, device=device, dtype=leaf.dtype)
            return torch.randn(leaf.shape, generator=generator).to(device, leaf.dtype)

        args, kwargs = tree_map(with_values, (self.args, self.kwargs))
        return Example(args, kwargs, self.source, self.is_for_one_mode)

    def without_large_values(self) -> Example:
        """Return a copy of these inputs with tensors on the meta device in place of large ones of floating point."""
        args, kwargs = tree_map(_without_large_values, (self.args, self.kwargs))
        return Example(args, kwargs, self.source, self.is_for_one_mode)


def _without_large_values(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_large = value.numel() > _LARGE and value.is_floating_point()
    if is_large:
        return value.to("meta")
    return value.detach().clone().requires_grad_(value.requires_grad)  # the caller may fill the tensor anew


def _without_values(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and value.is_floating_point() else value


def as_example(example_inputs: Any) -> Example:
    """Return what a caller gave: a tensor, a tuple or list of positional inputs, or a dict of keyword inputs.

    Raises:
        ArgumentTypeError: it is something else, or the keys of the dict are no strings.
    """
    source = "example_inputs"
    if isinstance(example_inputs, Example):
        return example_inputs
    if isinstance(example_inputs, Tensor):
        return Example((example_inputs,), {}, source)
    if isinstance(example_inputs, (tuple, list)):
        refuse_shape(cast("list[Any]", example_inputs), f"example_inputs={example_inputs!r:.80}")
        return Example(tuple(cast("list[Any]", example_inputs)), {}, source)
    if isinstance(example_inputs, Mapping):
        inputs = dict(cast("Mapping[Any, Any]", example_inputs))
        if all(isinstance(key, str) for key in inputs):
            return Example((), inputs, source)
    raise ArgumentTypeError(
        f"example_inputs must be a tensor, a tuple of positional inputs or a dict from parameter names of forward to "
        f"inputs, got {example_inputs!r:.80}; pass example_inputs=torch.rand(1, 3, 224, 224), say"
    )


def refuse_shape(values: Sequence[Any], what: str) -> None:
    """Raise if what is given as inputs is the shape of one.

    Raises:
        ArgumentTypeError: it is.
    """
    if len(values) > 2 and all(type(value) is int for value in values):
        sizes = ", ".join(map(str, values))
        raise ArgumentTypeError(f"{what} is a shape; give a tensor of it, torch.rand({sizes})")


def inputs_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], example_inputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a call: those that are given as in a call, or those in `example_inputs`.

    Raises:
        ArgumentTypeError: both are given, or as for `as_example`.
    """
    if example_inputs is None:
        return args, dict(kwargs)
    if args or kwargs:
        raise ArgumentTypeError("give the inputs as in a call of the model, or as example_inputs, not both")
    example = as_example(example_inputs)
    return example.args, example.kwargs


def holds_inputs(model: nn.Module, value: object) -> bool:
    """Say whether a value that is given as the first input of a model is a container of inputs, and not that input.

    A dict of inputs by name, or a tuple or list of inputs by position, is one if the first input is declared to be a
    tensor, and the model has such inputs.
    """
    if not isinstance(value, (Mapping, tuple, list)) or not value:
        return False
    signature = inspect.signature(model.forward)
    declared = str(next((each.annotation for each in signature.parameters.values()), ""))
    if not re.search(r"\bTensor\b", declared) or _OF_CONTAINERS.search(declared.lower()):
        return False
    args, kwargs = inputs_in(value)
    try:
        signature.bind_partial(*args, **kwargs)
    except TypeError:
        return False
    return bool(args) or not kwargs.keys().isdisjoint(signature.parameters)


def inputs_in(value: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional inputs in a tuple or list, or the inputs by name in a dict."""
    if isinstance(value, Mapping):
        return (), {str(name): each for name, each in cast("Mapping[object, Any]", value).items()}
    return tuple(cast("Sequence[Any]", value)), {}
