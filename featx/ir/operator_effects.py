"""What a torch function or method does, by its name: whether it writes its first argument, and whether it draws."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from featx.ir.node import Node

# Functions of torch written in Python that draw random numbers; operators are asked for their tags.
_RANDOM = frozenset(
    "gumbel_softmax fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices svd_lowrank pca_lowrank".split()
)
# Operators that draw random numbers unless the argument at this position says that this is not training.
_RANDOM_IN_TRAINING = {
    "dropout": 2, "dropout1d": 2, "dropout2d": 2, "dropout3d": 2, "alpha_dropout": 2, "feature_dropout": 2,
    "feature_alpha_dropout": 2, "native_dropout": 2, "rrelu": 3,
}  # fmt: skip
# These draw if they drop, which their arguments say.
ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
# Methods that change what happens to the gradient of a tensor.
HOOK_METHODS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
# Functions that write the running statistics that they are given, in training.
WRITE_STATISTICS = frozenset({"batch_norm", "instance_norm"})
_INPLACE_OPERATORS = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow lshift rshift and or xor matmul div".split()
)
# What gives a copy or shares the memory of an input, as its form, layout or dtype wants it.
_COPIES_IF_NEEDED = frozenset(
    "contiguous reshape reshape_as flatten ravel to type type_as float double half bfloat16 int long short char byte "
    "bool cfloat cdouble chalf cpu cuda conj_physical einsum pad interpolate upsample sum_to_size broadcast_tensors "
    "to_dense".split()
)


@functools.cache
def operator_writes(name: str) -> bool:
    """Say whether a torch function or method of this name writes its first argument: `add_`, `__setitem__`, `iadd`."""
    if is_magic(name):
        name = name[2:-2]
    if name in ("setitem", "delitem"):
        return True
    if name.startswith("i") and f"__{name}__" in _INPLACE_OPERATORS:
        return True
    return name.endswith("_") and hasattr(torch.Tensor, name)


def copies_if_needed(name: str) -> bool:
    """Say whether it depends on the input whether a torch function or method gives a copy, or shares memory."""
    return name in _COPIES_IF_NEEDED


@functools.cache
def operator_draws(name: str) -> bool:
    """Say whether a torch function or method of this name draws random numbers, in training at least."""
    if name in ATTENTION:
        return False
    return name in _RANDOM or name.rstrip("_") in _RANDOM_IN_TRAINING or _is_tagged_random(name)


def draws_now(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a torch function of this name draws random numbers when it is called with these arguments."""
    if not operator_draws(name) and name not in ATTENTION:
        return False
    position = _RANDOM_IN_TRAINING.get(name.rstrip("_"))
    if position is not None:
        if "training" in kwargs or "train" in kwargs or position < len(args):
            return is_set(args, kwargs, "training", position) or is_set(args, kwargs, "train", position)
        return name.rstrip("_") != "rrelu"
    if name in ATTENTION:
        probability = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return isinstance(probability, Node) or bool(probability)
    return True


def is_set(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, position: int | None) -> bool:
    """Say whether a flag is given, by name or at `position`; one that is itself computed may be set."""
    value = kwargs.get(name)
    if value is None and position is not None and position < len(args):
        value = args[position]
    return bool(value) if not isinstance(value, Node) else True


def is_magic(name: str) -> bool:
    """Say whether a method has a name such as `__add__`."""
    return name.startswith("__") and name.endswith("__")


@functools.cache
def _is_tagged_random(name: str) -> bool:
    if not name.isidentifier() or name.startswith("__"):
        return False
    operators = getattr(torch.ops.aten, name, None)
    return operators is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(operators, overload).tags for overload in operators.overloads()
    )
