"""Map over the nested values that models take and return."""

# TorchScript picks among overloads of one name, which torch.jit does not export by name for type checkers.
# pyright: reportRedeclaration=false, reportPrivateImportUsage=false

import copy
import dataclasses
import enum
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any, cast

import torch

from featx.errors import RequestError
from featx.rebuilding import attributes_of, rebuild_dict, rebuild_list, rebuild_object, rebuild_tuple

_WITHOUT_TENSORS = (
    Number, str, bytes, range, slice, type(None), type, enum.Enum, types.BuiltinFunctionType, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:  # Any: inputs and outputs of a model are of any type
    """Apply `function` to each leaf of `value`, keeping its structure.

    Tuples, named tuples, lists, dicts and other mappings (transformers' ModelOutput is one) and dataclass instances
    are structure; everything else is a leaf. A new structure is returned and `value` is not changed. O(leaves).
    """
    if isinstance(value, (tuple, list)):
        return rebuild_sequence(value, [tree_map(function, item) for item in cast(list[Any], value)])
    if isinstance(value, Mapping):
        items = {key: tree_map(function, item) for key, item in cast(Mapping[Any, Any], value).items()}
        return items if type(value) is dict else rebuild_mapping(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        attributes = attributes_of(value)
        for field in dataclasses.fields(value):
            attributes[field.name] = tree_map(function, getattr(value, field.name))
        return rebuild_object(type(value), attributes)
    return function(value)


# What TorchScript takes `clone_tensors` for, as it has no function of values of any type.
@torch.jit._overload
def clone_tensors(value: torch.Tensor) -> torch.Tensor: ...  # noqa: D103


@torch.jit._overload
def clone_tensors(value: list[torch.Tensor]) -> list[torch.Tensor]: ...  # noqa: D103, F811


@torch.jit._overload
def clone_tensors(value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...  # noqa: D103, F811


def clone_tensors(value: Any) -> Any:  # noqa: F811
    """Return `value` with each tensor in it cloned once; gradients flow through, and strides are kept.

    Code after a clone may ask for strides without saying so: `x.reshape(-1)` is a view of x, or a copy.

    Raises:
        RequestError: `value` holds an object that may have tensors and is no structure (see `tree_map`).
    """
    if not torch.jit.is_scripting():
        return tree_map(_clone_leaf if torch.compiler.is_compiling() else _ClonedOnce().of, value)
    if isinstance(value, torch.Tensor):
        return clone_tensor(value)
    if isinstance(value, list):
        return [clone_tensor(item) for item in value]
    return {key: clone_tensor(item) for key, item in value.items()}


class _ClonedOnce:
    """Clones of tensors: items that are one tensor are one clone."""

    def __init__(self) -> None:
        self._clones: dict[int, Any] = {}

    def of(self, leaf: Any) -> Any:
        if id(leaf) not in self._clones:
            self._clones[id(leaf)] = _clone_leaf(leaf)
        return self._clones[id(leaf)]


def _clone_leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return clone_tensor(leaf)
    if holds_no_tensor(leaf):
        return leaf
    raise RequestError(
        f"a requested value is a {type(leaf).__name__}, and a tensor in it may be overwritten later, so it "
        "would have to be copied. featx does not know how to copy it: request the tensors in it, by the names of the "
        "nodes that take them out"
    )


@torch.jit._overload
def held(value: list[torch.Tensor]) -> list[torch.Tensor]: ...  # noqa: D103


@torch.jit._overload
def held(value: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...  # noqa: D103, F811


def held(value: Any) -> Any:  # noqa: F811
    """Return a list or dict that generated code has made, so that it has a name."""
    return value


def items_at(value: Any, keys: tuple[str, ...]) -> Any:
    """Return the items of a dict at some keys, in their order, without those that it does not have."""
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else value


def with_defaults(given: dict[str, Any], defaults: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return keyword arguments with the defaults of those that are missing.

    In the order of `keys`, if `given` is in that order too; else the defaults come first.
    """
    missing = {key: value for key, value in defaults.items() if key not in given}
    filled = {**missing, **given}
    if [key for key in given if key in keys] != [key for key in keys if key in given]:
        return filled
    return {**{key: filled[key] for key in keys if key in filled}, **given}


def holds_no_tensor(value: object) -> bool:
    """Say whether a value surely has no tensors, or memory of tensors, in it. O(size)."""
    return _holds_no_tensor(value, set())


def _holds_no_tensor(value: object, around: set[int]) -> bool:
    if isinstance(value, _WITHOUT_TENSORS) or type(value) is object or id(value) in around:
        return True
    if isinstance(value, types.FunctionType):
        return not (value.__closure__ or value.__dict__ or value.__defaults__ or value.__kwdefaults__)
    if isinstance(value, (tuple, list, set, frozenset)):
        held: list[object] = list(cast(list[object], value))
    elif isinstance(value, dict):
        held = list(cast(dict[object, object], value).values())
    elif type(getattr(value, "__dict__", None)) is dict and not hasattr(type(value), "__slots__"):
        held = list(value.__dict__.values())
    else:  # an object in C, such as an iterator
        return False
    return not isinstance(value, torch.Tensor) and all(_holds_no_tensor(each, {*around, id(value)}) for each in held)


def clone_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a clone of a tensor with its strides and, as far as it asks for them, gradients."""
    clone = tensor.clone()
    if not torch.jit.is_scripting() and _has_other_strides(clone, tensor):
        clone = _copy_with_strides(tensor)
    # Without gradients a copy asks for none, where the tensor may.
    return clone if clone.requires_grad == tensor.requires_grad else clone.requires_grad_()


def _has_other_strides(clone: torch.Tensor, tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return clone.stride() != tensor.stride()


def _copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    one_of_each = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:  # an expanded dimension, which is one place in memory
            one_of_each = one_of_each.narrow(dim, 0, min(1, tensor.shape[dim]))
    clone = one_of_each.new_empty_strided(one_of_each.shape, tensor.stride()).copy_(one_of_each)
    return clone.expand(tensor.shape)


def tree_leaves(value: Any) -> Iterator[Any]:  # Any: as above
    """Yield the leaves of `value` in the order in which `tree_map` visits them."""
    if isinstance(value, (tuple, list)):
        for item in cast(tuple[Any, ...], value):
            yield from tree_leaves(item)
    elif isinstance(value, Mapping):
        for item in cast(Mapping[Any, Any], value).values():
            yield from tree_leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tree_leaves(getattr(value, field.name))
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:  # Any: as above
    """Return the leaves of `value` that are tensors, in that order."""
    if isinstance(value, torch.Tensor):  # mostly
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def rebuild_sequence(value: Any, items: list[Any]) -> Any:
    """Return a tuple or list like `value`, of its class and with its attributes, with other items."""
    kind: Any = type(value)
    # torch.return_types (what `x.max(dim)` gives) and torch.Size build from one iterable.
    if kind in (list, tuple, torch.Size) or hasattr(kind, "n_sequence_fields"):
        return kind(items)
    if issubclass(kind, tuple):
        return rebuild_tuple(kind, items, attributes_of(value))
    return rebuild_list(kind, items, attributes_of(value))


def rebuild_mapping(value: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping like `value`, of its class and with its attributes, with other items."""
    kind: Any = type(value)
    if not hasattr(kind, "__setitem__") or not hasattr(kind, "copy"):
        return kind(items)
    if issubclass(kind, dict) and not issubclass(kind, defaultdict):
        attributes = {
            name: items[name] if name in value and value[name] is held else held
            for name, held in attributes_of(value).items()
        }
        return rebuild_dict(kind, items, None if getattr(value, "__dict__", None) is value else attributes)
    made = copy.copy(value) if isinstance(value, defaultdict) else value.copy()
    for key, item in items.items():
        made[key] = item
    return made
