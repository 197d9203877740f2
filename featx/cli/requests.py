"""What is made of the texts of options: inputs of a model, and the request for its features."""

from __future__ import annotations

import re

import torch
from torch import nn

from featx.cli.errors import UserError
from featx.cli.options import Pool
from featx.examples import find_example
from featx.features.requests.feature import Feature
from featx.tree import tree_leaves

_DTYPES = {
    "": torch.float32, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float64": torch.float64, "int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
# Between names, and not between the characters of a pattern such as layer[3,4].
_COMMA = re.compile(r",(?![^\[]*\])")


def inputs_of(shapes: list[str]) -> tuple[torch.Tensor, ...] | None:
    """Return tensors of these shapes; None where there are none, so that they are guessed.

    Floating-point numbers are random, integers are 0, and booleans True.

    Raises:
        UserError: one is no shape.
    """
    return tuple(map(_input_of, shapes)) or None


def _input_of(text: str) -> torch.Tensor:
    sizes, _, name = text.partition(":")
    dtype = _DTYPES.get(name)
    if dtype is None or not re.fullmatch(r"[1-9]\d*([x,][1-9]\d*)*", sizes):
        raise UserError(
            f"--input is a shape, such as 1x3x64x64, or a shape and one of {', '.join(filter(None, _DTYPES))}, such as "
            f"2x9:int64; got '{text}'"
        )
    shape = [int(size) for size in re.split("[x,]", sizes)]
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype)
    return torch.full(shape, int(dtype is torch.bool), dtype=dtype)


def shapes_of(model: nn.Module, shapes: list[str]) -> str:
    """Return the shapes of what was typed, or of the inputs that are guessed for the model, in words."""
    example = None if shapes else find_example(model, model.training)
    leaves = inputs_of(shapes) if example is None else tree_leaves((example.args, example.kwargs))
    found = ("x".join(map(str, leaf.shape)) for leaf in leaves or () if isinstance(leaf, torch.Tensor))
    return ", ".join(found) or "no size"


def requested(names: list[str], pool: str | None, dtype: str | None = None) -> dict[str, Feature]:
    """Return the request for what was typed: `layer2=C3`, `blocks.*`, or several with commas.

    Raises:
        UserError: a name is empty, or given twice.
    """
    request: dict[str, Feature] = {}
    for each in [part.strip() for text in names for part in _COMMA.split(text)]:
        name, _, key = each.partition("=")
        if not name or name in request:
            raise UserError(f"--nodes has {f'{name} twice' if name else 'an empty name'}: {', '.join(names)}")
        request[name] = Feature(
            key or None, pool=None if pool is None else Pool(pool).value,
            dtype=None if dtype is None else getattr(torch, dtype),
        )  # fmt: skip
    return request
