"""Describe how values are nested, and what they hold besides tensors, as values that compare with `==`."""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from numbers import Number
from typing import Any, cast

import torch
from torch import nn

from featx.rebuilding import attributes_beside_items, attributes_of, contents_of_cell
from featx.tracing.guards.scalars import TracedFloat, TracedInt, TracedNumber, plain_number
from featx.tracing.objects.arrays import description_of
from featx.tracing.objects.plain_objects import is_plain_object

# Describes an object, given the ids of the objects around it.
_Describe = Callable[[Any, tuple[int, ...]], Any]
_BY_TEXT = (
    Number, bytes, range, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    torch.finfo, torch.iinfo,
)  # fmt: skip


def form_of(value: Any) -> Any:
    """Describe how `value` is nested, with its tensors by number of dimensions and its numbers by kind. O(size)."""
    return _form_of(value, (), _form_of_object)


def form_of_result(value: Any) -> Any:
    """Describe as `form_of`, with all that is neither a tensor nor an item of a tuple, list or dict by value. O(size).

    A trace follows the items of what a call returns, and numbers, in tuples and lists too, beside the tensors of an
    object. What else objects hold, and attributes that code has given to tensors, Python reads unobserved.

    Returns:
        The form; None where there is an object that has no description, such as an iterator.
    """
    try:
        return _form_of(value, (), _contents_of)
    except _IndescribableError:
        return None


def attributes_given_to(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that somebody has given to a tensor; those of subclasses are their own."""
    return vars(tensor) if type(tensor) is torch.Tensor else {}


def holds_tensors(value: object) -> bool:
    """Say whether a value is a plain object with a tensor among its attributes: a result, and no settings."""
    return (
        not isinstance(value, (torch.Tensor, tuple, list, dict))
        and is_plain_object(value)
        and any(isinstance(item, torch.Tensor) for item in attributes_of(value).values())
    )


class _IndescribableError(Exception):
    pass


def _form_of(value: Any, around: tuple[int, ...], of_object: _Describe) -> Any:
    if isinstance(value, torch.Tensor):
        form = f"tensor of {value.dim()} dimensions"
        attributes = attributes_given_to(value) if of_object is _contents_of else {}
        contents = [(name, _contents_of(item, around)) for name, item in attributes.items()]
        return (form, *contents) if contents else form
    if isinstance(value, (tuple, list)):
        items = [_form_of(item, around, of_object) for item in cast(list[Any], value)]
        return (type(value).__name__, *items, *_form_beside_items(value, around, of_object))
    if isinstance(value, dict):
        items = [(key, _form_of(item, around, of_object)) for key, item in cast(dict[Any, Any], value).items()]
        kind = "dict" if type(value) in (dict, OrderedDict) else type(value).__name__
        return (kind, *items, *_form_beside_items(value, around, of_object))
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return type(value).__mro__[-2].__name__
    return of_object(value, around)


def _form_beside_items(container: Any, around: tuple[int, ...], of_object: _Describe) -> list[Any]:
    """Describe what a container of a class of its own has besides its items, in a list that is empty mostly."""
    attributes = attributes_beside_items(container)
    if id(container) in around or not attributes:
        return ["the container around it"] if id(container) in around else []
    inside = (*around, id(container))
    describe = of_object if of_object is _contents_of else functools.partial(_form_of, of_object=of_object)
    return [("attributes", *[(name, describe(held, inside)) for name, held in attributes.items()])]


def _form_of_object(value: Any, around: tuple[int, ...]) -> Any:
    if isinstance(value, deque):
        items = [_form_of(item, around, _form_of_object) for item in cast(deque[Any], value)]
        return ("deque", *items, *_form_beside_items(value, around, _form_of_object))
    if isinstance(value, types.MappingProxyType):
        return "mappingproxy", *_form_of(dict(cast(Any, value)), around, _form_of_object)[1:]
    if is_plain_object(value):
        return _attributes(value, around, lambda item, inside: _form_of(item, inside, _form_of_object))
    return type(value).__name__


def _attributes(value: Any, around: tuple[int, ...], describe: _Describe) -> Any:
    if id(value) in around:
        return "the object around it"
    items = [(name, describe(item, (*around, id(value)))) for name, item in attributes_of(value).items()]
    return type(value).__qualname__, *items


def _contents_of(value: Any, around: tuple[int, ...] = ()) -> Any:
    kind = type(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        return _form_of(value, around, _contents_of)
    if isinstance(value, TracedNumber):
        return _contents_of(plain_number(value))
    if isinstance(value, _BY_TEXT):
        return kind.__qualname__, repr(value)
    if isinstance(value, slice):
        return kind.__qualname__, _contents_of((value.start, value.stop, value.step), around)
    if isinstance(value, (tuple, list, deque)):
        return kind.__qualname__, *[_contents_of(item, around) for item in cast(list[Any], value)]
    if isinstance(value, (dict, types.MappingProxyType)):
        items = cast(dict[Any, Any], value).items()
        return kind.__qualname__, *[(_contents_of(key, around), _contents_of(item, around)) for key, item in items]
    if isinstance(value, (set, frozenset)):
        return kind.__qualname__, *sorted(str(_contents_of(item, around)) for item in cast(set[Any], value))
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return kind.__qualname__, *description_of(value)
    return _contents_of_other(value, around)


def _contents_of_other(value: Any, around: tuple[int, ...]) -> Any:
    kind = type(value)
    if isinstance(value, nn.Module):
        return kind.__qualname__
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if isinstance(value, (type, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return kind.__qualname__, getattr(value, "__module__", ""), value.__qualname__
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, (type, types.ModuleType)):
        return kind.__qualname__, value.__module__, value.__qualname__
    if isinstance(value, functools.partial):
        partial = cast(functools.partial[Any], value)
        return kind.__qualname__, _contents_of((partial.func, partial.args, partial.keywords), around)
    if isinstance(value, types.MethodType):
        return kind.__qualname__, value.__func__.__qualname__, _contents_of(value.__self__, around)
    if isinstance(value, types.FunctionType):
        return _contents_of_function(value, around)
    if is_plain_object(value):
        return _attributes(value, around, _item_beside_tensors if holds_tensors(value) else _contents_of)
    raise _IndescribableError


def _item_beside_tensors(value: Any, around: tuple[int, ...]) -> Any:
    if type(value) in (int, float, TracedInt, TracedFloat):
        return type(value).__mro__[-2].__name__
    if type(value) in (tuple, list):
        items = cast(list[Any], value)
        return type(value).__name__, *[_item_beside_tensors(item, around) for item in items]
    return _contents_of(value, around)


def _contents_of_function(function: types.FunctionType, around: tuple[int, ...]) -> Any:
    if id(function) in around:
        return "the function around it"
    code, inside = function.__code__, (*around, id(function))
    cells = [contents_of_cell(cell, "a variable without a value") for cell in function.__closure__ or ()]
    kept = _contents_of((function.__defaults__, function.__kwdefaults__, cells), inside)
    # Two lambdas of one line differ in their positions.
    written = hashlib.sha256(repr((code.co_code, list(code.co_positions()))).encode()).hexdigest()
    return "function", function.__module__, function.__qualname__, written, kept
