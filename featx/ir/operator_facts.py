"""What torch's functions and methods do, by their name: one account, which pruning, passes, rewriting and tracing ask.

Torch states in schemas and tags what operators write, view and draw; `facts_of` asks these. Its tables hold what no
schema says, and functions of torch that are written in Python.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from featx.ir.names import has_borrowed_name, qualified_name
from featx.ir.node import Node

# Functions of torch written in Python that draw random numbers; operators are asked for their tags.
_RANDOM = frozenset(
    "gumbel_softmax fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices svd_lowrank pca_lowrank "
    # Of torch.nn.init, and no methods of tensors.
    "xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ trunc_normal_ orthogonal_ sparse_".split()
)
# Operators that draw random numbers unless the argument at this position says that this is not training.
_RANDOM_IN_TRAINING = {
    "dropout": 2, "dropout1d": 2, "dropout2d": 2, "dropout3d": 2, "alpha_dropout": 2, "feature_dropout": 2,
    "feature_alpha_dropout": 2, "native_dropout": 2, "rrelu": 3,
}  # fmt: skip
# Those of them that do not train by default.
_EVAL_BY_DEFAULT = frozenset({"alpha_dropout", "feature_alpha_dropout", "rrelu"})
# Where they have their probability of dropout.
_DROPOUT_AT = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
_HOOK_METHODS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
# The ends of their names: `native_batch_norm` is one.
_WRITE_STATISTICS = (
    "batch_norm", "instance_norm", "batch_norm_impl_index", "batch_norm_update_stats", "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
)  # fmt: skip
_INPLACE_OPERATORS = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow lshift rshift and or xor matmul div".split()
)
_CONVERSIONS = frozenset(
    "to type type_as float double half bfloat16 int long short char byte bool cfloat cdouble chalf cpu cuda contiguous "
    "to_dense".split()
)
_COPIES_IF_NEEDED = _CONVERSIONS | frozenset(
    "reshape reshape_as flatten ravel conj_physical einsum pad interpolate upsample sum_to_size "
    "broadcast_tensors".split()
)
_MAY_RETURN_INPUT = frozenset(
    "dropout alpha_dropout feature_dropout feature_alpha_dropout meshgrid atleast_1d atleast_2d atleast_3d "
    "as_tensor asarray cartesian_prod chain_matmul multi_dot unsafe_chunk unsafe_split unsafe_split_with_sizes "
    "dequantize resize".split()
)
_READS_VALUES = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ equal is_nonzero "
    "allclose __repr__ __str__ __format__".split()
)
_READS_FORM = frozenset(
    "size dim numel nelement stride ndimension is_floating_point is_complex get_device element_size".split()
)
_NEEDS_FORM_OF_FIRST = frozenset(
    "new_empty new_full new_ones new_tensor new_zeros empty_like full_like ones_like zeros_like".split()
)
# Embeddings, which may renormalize the rows that they look up.
RENORMALIZING = frozenset({"embedding", "embedding_bag"})
# Attributes of a tensor that are tensors which share its memory.
VIEW_ATTRIBUTES = frozenset({"T", "H", "mT", "mH", "data", "real", "imag"})
_NEEDS_FORM_OF_OTHERS = frozenset({"expand_as", "reshape_as", "to", "type_as", "view_as"})


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What torch's functions, methods and operators of one name do, as far as the name decides it.

    Attributes:
        writes_first: it writes its first argument: `add_`, `__setitem__`, `iadd`.
        writes_statistics: it writes the running statistics that it is given, in training.
        changes_gradients: it changes what happens to the gradient of a tensor.
        converts: it changes the dtype, device or layout of its first argument, and has nothing left to do if it is
            called for its result in the same way.
        copies_if_needed: it gives a copy, or shares the memory of an input, as the form, layout or dtype wants it.
        may_return_input: it may return an input, or a view of it, although its schema does not say so.
        may_be_view: it may return an input, or a view of it: its schema says so, or `may_return_input` does.
        returns_tensor: it returns one tensor, whatever its other arguments are.
        draws: it draws random numbers, in training at least.
        training_at: the position of the argument that says whether this is training, for those that draw only there.
        dropout_at: the position of a probability of dropout, without which it does not draw.
        reads_values: it gives Python values of a tensor.
        reads_form: it gives Python the form of a tensor, such as its shape or dtype.
        needs_form_of_first: it uses of its first argument the form alone.
        needs_form_of_others: it uses of all but its first argument the form alone.
    """

    writes_first: bool
    writes_statistics: bool
    changes_gradients: bool
    converts: bool
    copies_if_needed: bool
    may_return_input: bool
    may_be_view: bool
    returns_tensor: bool
    draws: bool
    training_at: int | None
    dropout_at: int | None
    reads_values: bool
    reads_form: bool
    needs_form_of_first: bool
    needs_form_of_others: bool


@functools.cache
def facts_of(name: str) -> OperatorFacts:
    """Return what torch's functions and methods of this name do. O(1) after the first time."""
    plain = name.rstrip("_")
    dropout_at = _DROPOUT_AT.get(name)
    is_random = name in _RANDOM or plain in _RANDOM_IN_TRAINING or _is_tagged_random(name)
    may_return_input = name in _COPIES_IF_NEEDED or name in _MAY_RETURN_INPUT
    return OperatorFacts(
        writes_first=_writes_first(name),
        writes_statistics=name.endswith(_WRITE_STATISTICS),
        changes_gradients=name in _HOOK_METHODS,
        converts=name in _CONVERSIONS,
        copies_if_needed=name in _COPIES_IF_NEEDED,
        may_return_input=may_return_input,
        may_be_view=may_return_input or _is_view_by_schema(name),
        returns_tensor=_returns_tensor(name),
        draws=is_random and dropout_at is None,
        training_at=_RANDOM_IN_TRAINING.get(plain),
        dropout_at=dropout_at,
        reads_values=name in _READS_VALUES,
        reads_form=name in _READS_FORM,
        needs_form_of_first=name in _NEEDS_FORM_OF_FIRST,
        needs_form_of_others=name in _NEEDS_FORM_OF_OTHERS,
    )


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call of torch, by position or by the names that torch has for it; None if none."""
    if args:
        return args[0]
    return next((kwargs[name] for name in ("self", "input", "tensor") if name in kwargs), None)


def targets_of_write(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what a call of torch that writes may write: its first argument, and `out`."""
    return first_argument(args, kwargs), kwargs.get("out")


def tensors_written(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a call of torch may write: what its name says, running statistics, or rows that it renormalizes."""
    name = name_of(function)
    facts = facts_of(name)
    if facts.writes_statistics:
        return statistics_written(function, args, kwargs)
    if renormalizes(name, args, kwargs):
        return (*args[:2], kwargs.get("weight"))
    return targets_of_write(args, kwargs) if facts.writes_first or "out" in kwargs else ()


def renormalizes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Say whether an embedding may scale down the rows that it looks up, which `max_norm` asks for."""
    return name in RENORMALIZING and (bool(kwargs.get("max_norm")) or len(args) > 3)


def statistics_written(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the running statistics that a call of batch or instance norm gets, if it may write them.

    Args:
        function: what is called; its name `writes_statistics`.
        args: its arguments by position.
        kwargs: those by name.
    """
    is_update = name_of(function).endswith("update_stats")
    flags = (*args[5:6], kwargs.get("training"), kwargs.get("use_input_stats"))
    if not is_update and any(flag is False for flag in flags):  # they are only read
        return ()
    # F.batch_norm(input, mean, variance, ...), but torch.batch_norm(input, weight, bias, mean, variance, ...).
    first = 1 if is_update or inspect.isfunction(function) else 3
    given = (kwargs.get("running_mean"), kwargs.get("running_var"), *args[first : first + 2])
    return tuple(each for each in given if each is not None)


def facts_of_call(node: Node) -> OperatorFacts:
    """Return what a node's call does as far as torch or Python's operators decide it; of other functions nothing."""
    target = node.target
    if node.op != "call_function":
        return facts_of(name_of(target) if node.op == "call_method" else "")
    name = "" if has_borrowed_name(target) else qualified_name(target)
    return facts_of(name.rpartition(".")[2] if name.startswith(("torch.", "operator.")) else "")


def draws_now(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a torch function of this name draws random numbers when it is called with these arguments."""
    facts = facts_of(name)
    if facts.dropout_at is not None:
        is_eval = kwargs.get("training") is False
        return not is_eval and is_set(args, kwargs, "dropout_p", facts.dropout_at)
    position = facts.training_at
    if not facts.draws or position is None:
        return facts.draws
    return is_training(args, kwargs, position, by_default=name.rstrip("_") not in _EVAL_BY_DEFAULT)


def is_training(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, *, by_default: bool) -> bool:
    """Say whether a call says that this is training, by name or at `position`; one that is computed may say so."""
    if "training" in kwargs or "train" in kwargs or position < len(args):
        return is_set(args, kwargs, "training", position) or is_set(args, kwargs, "train", position)
    return by_default


def is_set(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, position: int | None) -> bool:
    """Say whether a flag is given, by name or at `position`; one that is itself computed may be set."""
    value = kwargs.get(name)
    if value is None and position is not None and position < len(args):
        value = args[position]
    return bool(value) if not isinstance(value, Node) else True


def name_of(target: object) -> str:
    """Return the name of what a node calls, without its module, as `facts_of` takes it."""
    return str(getattr(target, "__name__", target))


def is_magic(name: str) -> bool:
    """Say whether a method has a name such as `__add__`."""
    return name.startswith("__") and name.endswith("__")


def _writes_first(name: str) -> bool:
    if is_magic(name):
        name = name[2:-2]
    if name in ("setitem", "delitem"):
        return True
    if name.startswith("i") and f"__{name}__" in _INPLACE_OPERATORS:
        return True
    return name.endswith("_") and hasattr(torch.Tensor, name)


def _is_tagged_random(name: str) -> bool:
    if not name.isidentifier() or name.startswith("__"):
        return False
    operators = getattr(torch.ops.aten, name, None)
    return isinstance(operators, torch._ops.OpOverloadPacket) and any(
        torch.Tag.nondeterministic_seeded in getattr(operators, overload).tags for overload in operators.overloads()
    )


def _is_view_by_schema(name: str) -> bool:
    """Say whether a form of an operator without `out=` returns memory of an argument."""
    return any(
        not any(is_written(argument) for argument in schema.arguments if argument.kwarg_only)
        and any(result.alias_info is not None for result in schema.returns)
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    )


def _returns_tensor(name: str) -> bool:
    """Say whether every form of an operator that has to do with tensors returns one of them."""
    schemas = [schema for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}") if "Tensor" in str(schema)]
    return bool(schemas) and all([str(each.type) for each in schema.returns] == ["Tensor"] for schema in schemas)


def is_written(argument: Any) -> bool:
    """Say whether an operator writes an argument, as its schema says."""
    return argument.alias_info is not None and argument.alias_info.is_write
