"""Shapes of what nodes compute: those of tensors, and of tensors inside tuples, lists, dicts and objects."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from featx.ir.node import Node
from featx.tracing.nodes.module_output import module_output

# Shape and dtype, by what takes the tensor out: "" for the value itself, `[1][0]`, `.last_hidden_state`.
Forms = dict[str, tuple[tuple[int, ...], torch.dtype | None]]


def forms_of(value: Any) -> Forms:
    """Return shapes and dtypes of the tensors in the value of a node, or in a container of nodes. O(size).

    What a trace has not seen is left out.
    """
    if isinstance(value, Node):
        return _forms_of_node(value)
    if isinstance(value, Mapping):
        items = [(repr(key), item) for key, item in cast(Mapping[Any, Any], value).items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        items = [(str(index), item) for index, item in enumerate(cast(Sequence[Any], value))]
    else:
        return {}
    return {f"[{key}]{path}": form for key, item in items for path, form in forms_of(item).items()}


def _forms_of_node(node: Node) -> Forms:
    meta = node.meta
    if "shape" in meta:
        shape = meta["shape"]
        # Where the trace was symbolic, sizes are no numbers.
        return {"": (tuple(shape), meta.get("dtype"))} if all(type(size) is int for size in shape) else {}
    if "parts" in meta:
        return {path: (tuple(shape), dtype) for path, (shape, dtype) in meta["parts"].items()}
    if node.target is module_output:
        return forms_of(node.args[0])
    if isinstance(node.target, type) and issubclass(node.target, Mapping):  # OrderedDict({"out": ...})
        return {path: form for given in (*node.args, node.kwargs) for path, form in forms_of(given).items()}
    if node.target in (operator.getitem, getattr) and len(node.args) == 2:
        key = node.args[1]
        start = f"[{key!r}]" if node.target is operator.getitem else f".{key}"
        return {
            path[len(start) :]: form
            for path, form in forms_of(node.args[0]).items()
            if path == start or path.startswith((f"{start}.", f"{start}["))
        }
    return {}


def shapes_in(value: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors inside a container, by what takes them out."""
    items = cast(Mapping[Any, Any], value).items() if isinstance(value, Mapping) else ()
    if isinstance(value, (tuple, list)):
        items = enumerate(cast(Sequence[Any], value))
    found: dict[str, tuple[int, ...]] = {}
    for key, item in items:
        inside = {"": tuple(item.shape)} if isinstance(item, torch.Tensor) else shapes_in(item)
        found.update({f"[{key!r}]{path}": shape for path, shape in inside.items()})
    return found


def text_of_shape(shape: tuple[int, ...] | None, shapes: Mapping[str, tuple[int, ...]], most: int = 3) -> str:
    """Return `2x5x8` for a tensor and `[0] 2x5x8, [1] 2x8` for what holds several, of which `most` are shown."""
    if shape is not None:
        return "x".join(map(str, shape))
    texts = [f"{path} {text_of_shape(each, {})}" for path, each in shapes.items()]
    return ", ".join([*texts[:most], f"{len(texts) - most} more"] if len(texts) > most else texts)
