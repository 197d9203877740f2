"""What code that stands alone checks and loads; the source of these functions is written into it.

The functions need torch, one another, and functions of featx whose sources can be written into it too.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from featx.ir.memory import overlap
from featx.rebuilding import with_items
from featx.tree import clone_tensor


class SpecializationError(RuntimeError):
    """The code was made from one run of a model, which would do something else for this input."""


def check_decision(value: Any, expected: Any, what: str, when_compiled: str = "check") -> None:
    """Raise unless the model would decide as it did on the example; compiled, it may not ask and decide "no"."""
    is_compiled = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if when_compiled in ("no", "pass") and is_compiled:
        if when_compiled == "no" and expected:
            raise SpecializationError(f"{what}: make the code with an example whose mask has a 0, to compile it")
    elif isinstance(value, (bool, torch.SymBool)) and isinstance(expected, bool):
        if (True if value else False) is not expected:  # noqa: SIM210 - bool() of a symbolic one is not compiled
            raise SpecializationError(f"{what}: {not expected} now, {expected} on the example")
    elif not bool(value == expected) and not (value != value and expected != expected):
        raise SpecializationError(f"{what}: {value!r:.80} now, {expected!r:.80} on the example")


def check_constant(value: Any, expected: Any, what: str) -> None:
    """Raise unless an input that is no tensor is what it was on the example."""
    if not is_same(value, expected):
        raise SpecializationError(f"{what}: {value!r:.80} now, {expected!r:.80} on the example")


def is_same(one: Any, other: Any) -> bool:
    """Say whether two values without tensors are the same: nan is nan, True is not 1, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    return repr(one) == repr(other) if isinstance(one, (float, complex)) else bool(one == other)


def check_not_given(value: Any, what: str) -> None:
    """Raise where an input is given that was left out on the example."""
    if value is not None:
        raise SpecializationError(f"{what} is given now, and was left out, or None, on the example")


def check_dtype(value: torch.dtype, allowed: list[torch.dtype], what: str) -> None:
    """Raise unless a dtype is one of those in which the model was traced."""
    if value not in allowed:
        raise SpecializationError(f"{what}: {value} now; the model was traced in {allowed}")


def check_is_tensor(value: Any, what: str) -> None:
    """Raise unless a value is a tensor, as on the example."""
    if not isinstance(value, torch.Tensor):
        raise SpecializationError(f"{what} is {value!r:.80} now, a tensor on the example")


def check_rank(value: torch.Tensor, expected: int, what: str) -> None:
    """Raise unless a tensor has as many dimensions as on the example."""
    if value.dim() != expected:
        raise SpecializationError(f"{what} has {value.dim()} dimensions now, {expected} on the example")


def check_layout(value: torch.Tensor, layout: str, name: str) -> None:
    """Raise unless a value has as many dimensions as the layout that was asked for."""
    if value.dim() != len(layout):
        raise SpecializationError(f"'{name}' is to have the layout {layout}, and has shape {tuple(value.shape)}")


def check_size(value: torch.Tensor, dim: int, expected: int | None, what: str) -> None:
    """Raise unless a dimension has the length that it had on the example; with None, any but 0."""
    length = value.shape[dim] if value.dim() > dim else -1
    if length < 1 if expected is None else length != expected:
        raise SpecializationError(f"dimension {dim} of {what}: the input has shape {tuple(value.shape)}")


def check_aliases(values: Any, expected: Any, is_written: bool = False) -> None:
    """Raise unless the same inputs are one tensor as on the example; None is different ones. Written ones are apart."""
    is_compiling = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if is_written and not is_compiling and overlap(tensors_in(values)):
        raise SpecializationError("two inputs are views of the same memory now, and one of them is written")
    aliases = aliases_of(values)
    if aliases != (expected or tuple(range(len(aliases)))):
        raise SpecializationError("other inputs are one tensor now than on the example")


def check_same_items(value: Any, expected: Any, what: str) -> None:
    """Raise unless the same items of a result are one tensor as on the example."""
    if aliases_of(value) != expected:
        raise SpecializationError(f"other items of {what} are one tensor than on the example")


def aliases_of(values: Any) -> Any:
    """Return for each tensor in a value the position of the first one that is the same object."""
    tensors = [id(value) for value in tensors_in(values)]
    return tuple(map(tensors.index, tensors))


def version_of(value: Any) -> int:
    """Return how often the tensors in a value were written in place; -1 where torch does not count that."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return -1
    tensors = tensors_in(value)
    return -1 if any(tensor.is_inference() for tensor in tensors) else sum([tensor._version for tensor in tensors])


def check_version(value: Any, version: int, what: str) -> None:
    """Raise if a value was written in place since its version was taken, where both are counted."""
    now = version_of(value)
    if now != version and now >= 0 and version >= 0:
        raise SpecializationError(f"{what}, which did not do that on the example")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors in nested values."""
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def check_form(value: Any, form: Any, what: str) -> None:
    """Raise unless a value is nested as on the example."""
    if form_of(value) != form:
        raise SpecializationError(f"the form of {what}: {form_of(value)} now, {form} on the example")


def form_of(value: Any) -> Any:
    """Describe how a value is nested, with its tensors by number of dimensions and its numbers by kind."""
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dim()} dimensions"
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *[form_of(item) for item in value])
    if isinstance(value, dict):
        return ("dict", *[(key, form_of(item)) for key, item in value.items()])
    if value is None or isinstance(value, (bool, str)):
        return value
    attributes = getattr(value, "__dict__", None)
    if attributes:
        return (type(value).__qualname__, *[(name, form_of(item)) for name, item in attributes.items()])
    return type(value).__name__


def raise_mode_not_traceable(mode: str, reason: str) -> None:
    """Raise, since the model could not be traced in this mode."""
    raise SpecializationError(f"there is no code for {mode} mode, in which the model could not be traced: {reason}")


def check_held(value: Any, left: Any, what: str) -> None:
    """Raise unless a call has left in a list, a dict or an object what it left there on the example."""
    if left is ...:
        return
    if isinstance(left, (list, tuple)):
        is_same = isinstance(value, (list, tuple)) and len(value) == len(left)
        pairs = [*zip(value, left, strict=True)] if is_same else []
    elif isinstance(left, dict):
        items = value if isinstance(value, dict) else vars(value)
        is_same = list(items) == list(left)
        pairs = [(items[key], left[key]) for key in left] if is_same else []
    else:
        is_plain = not isinstance(left, torch.Tensor) and type(value) is type(left)
        is_same, pairs = value is left or (is_plain and bool(value == left)), []
    if not is_same:
        raise SpecializationError(f"{what} is something else than on the example")
    for now, then in pairs:
        check_held(now, then, what)


def clone_tensors(value: Any, clones: Any = None) -> Any:
    """Return a value with each tensor in it cloned once, which the model overwrites later."""
    clones = {} if clones is None else clones
    if isinstance(value, torch.Tensor):
        if id(value) not in clones:
            clones[id(value)] = clone_tensor(value)
        return clones[id(value)]
    if isinstance(value, (tuple, list)):
        return with_items(value, [clone_tensors(item, clones) for item in value])
    return {key: clone_tensors(item, clones) for key, item in value.items()} if isinstance(value, dict) else value


def safetensors_dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes that a safetensors file may have, by their names in it."""
    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    }  # fmt: skip


def read_safetensors(path: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors, dtypes = {}, safetensors_dtypes()
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        flat = torch.frombuffer(data[start:end], dtype=dtypes[entry["dtype"]]) if end > start else torch.empty(0)
        tensors[name] = flat.to(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def put(root: nn.Module, path: str, value: Any, persistent: bool = True) -> None:
    """Put a module, a parameter or a buffer at a dotted path below a module."""
    owner = root
    *parents, name = path.split(".")
    for parent in parents:
        if owner._modules.get(parent) is None:
            owner.add_module(parent, nn.Module())
        owner = getattr(owner, parent)
    if isinstance(value, (nn.Module, nn.Parameter)):
        setattr(owner, name, value)
    else:
        owner.register_buffer(name, value, persistent)
