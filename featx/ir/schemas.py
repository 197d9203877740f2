"""Match the arguments of a call with the signature of what is called, in positional or keyword form."""

from __future__ import annotations

import inspect
import keyword
import numbers
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Union, get_args, get_origin

import torch
from torch import nn
from torch._jit_internal import boolean_dispatched

from featx.errors import MutationError, PassError, TargetError
from featx.ir.names import qualified_name

_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# What the types of an operator's schema are in Python; those that are not here are Any.
_TYPES: dict[str, Any] = {
    "Tensor": torch.Tensor, "int": int, "SymInt": int, "float": float, "bool": bool, "str": str, "complex": complex,
    "number": numbers.Number, "Scalar": numbers.Number, "Device": torch.device, "Generator": torch.Generator,
}  # fmt: skip


class ArgsKwargsPair(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def normalize_function(
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    arg_types: tuple[Any, ...] | None = None,
    kwarg_types: Mapping[str, Any] | None = None,
    normalize_to_only_use_kwargs: bool = False,
) -> ArgsKwargsPair | None:
    """Return the arguments of a call of `target` by name, defaults included; None where its signature is not known.

    Those that are given by position stay so, unless `normalize_to_only_use_kwargs`. Of several overloads of an operator
    the one counts to which arguments of `arg_types` and `kwarg_types` can be passed.

    Raises:
        PassError: several overloads of an operator of torch fit, with other names or defaults, and no types are given.
    """
    keywords = dict(kwargs or {})
    if inspect.isfunction(target):
        return _bound(signature_of_function(target), args, keywords, normalize_to_only_use_kwargs)
    signatures = get_signature_for_torch_op(target) or []
    fitting = [signature for signature in signatures if _binds(signature, args, keywords)]
    if len(fitting) > 1 and (arg_types is not None or kwarg_types is not None):
        types = (tuple(arg_types or ()), dict(kwarg_types or {}))
        fitting = [signature for signature in fitting if _accepts(signature, *types)][:1]
    found = [_bound(signature, args, keywords, normalize_to_only_use_kwargs) for signature in fitting]
    if len({_defaults_of(pair, keywords) for pair in found}) > 1:
        if qualified_name(target).startswith("operator."):  # `a + b`, of which torch.fx knows no signature
            return None
        listed = "\n".join(map(str, fitting))
        raise PassError(f"{qualified_name(target)} has several overloads that fit; give arg_types:\n{listed}")
    return found[0] if found else None


def normalize_module(
    root: nn.Module,
    target: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    normalize_to_only_use_kwargs: bool = False,
) -> ArgsKwargsPair | None:
    """Return the arguments of a call of the submodule `target`, as `normalize_function`; None unless it is torch.nn's.

    Raises:
        TargetError: `root` has no such submodule.
    """
    try:
        module = root.get_submodule(target)
    except AttributeError:
        raise TargetError(f"{type(root).__name__} has no submodule '{target}'") from None
    if getattr(nn, type(module).__name__, None) is not type(module):
        return None
    return _bound(inspect.signature(module.forward), args, dict(kwargs or {}), normalize_to_only_use_kwargs)


def signature_of_function(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function written in Python, also of one that only chooses between two of one signature.

    `max_pool2d` is one of those: it calls the function that gives indices, or the other.
    """
    return inspect.signature(boolean_dispatched[function]["if_true"] if function in boolean_dispatched else function)


def get_signature_for_torch_op(op: Any, return_schemas: bool = False) -> Any:
    """Return the signatures of the overloads of an operator of torch, None for anything else.

    The first argument of a method is called `input`, as in Python. With `return_schemas` also torch's schemas.
    """
    schemas = _schemas_of(op)
    signatures = None if schemas is None else [_signature_of(schema) for schema in schemas]
    return (signatures, schemas) if return_schemas else signatures


def check_for_mutable_operation(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the one overload of an operator that fits the arguments writes them.

    Raises:
        MutationError: it does.
    """
    fitting = [schema for schema in _schemas_of(target) or () if _binds(_signature_of(schema), args, kwargs)]
    if len(fitting) == 1 and fitting[0].is_mutable:
        raise MutationError(
            f"{qualified_name(target)} writes one of its arguments: {fitting[0]}; it is a mutable operation"
        )


def type_matches(signature_type: Any, argument_type: Any) -> bool:
    """Say whether an argument of one type can be passed to a parameter of another one."""
    origin, inner = get_origin(signature_type), get_args(signature_type)
    if signature_type is Any or signature_type is argument_type:
        return True
    if origin in (Union, types.UnionType):
        return any(type_matches(kind, argument_type) for kind in inner)
    if origin is list:
        # A tuple of ints serves for a list, and one int for a list of them.
        items = set(get_args(argument_type)) - {Ellipsis} or {argument_type}
        is_sequence = get_origin(argument_type) in (list, tuple)
        return (is_sequence or inner[0] is int) and all(type_matches(inner[0], item) for item in items)
    if signature_type is int and argument_type is torch.dtype:
        return True  # schemas call a dtype int
    if signature_type is numbers.Number:
        return argument_type in (int, float)
    return isinstance(argument_type, type) and isinstance(signature_type, type) and issubclass(
        argument_type, signature_type
    )  # fmt: skip


def _schemas_of(op: Any) -> list[Any] | None:
    if isinstance(op, torch._ops.OpOverload):
        return [op._schema]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [getattr(op, overload)._schema for overload in op.overloads()]
    if not inspect.isbuiltin(op) and not inspect.ismethoddescriptor(op):
        return None
    module = qualified_name(op).rpartition(".")[0]
    if module != "operator" and not module.startswith("torch"):
        return None
    return torch._C._jit_get_schemas_for_operator(f"aten::{op.__name__}") or None


def _signature_of(schema: Any) -> inspect.Signature:
    parameters: list[inspect.Parameter] = []
    for argument in schema.arguments:
        name = "input" if argument.name == "self" else argument.name
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        if keyword.iskeyword(name):
            kind = inspect.Parameter.POSITIONAL_ONLY
            parameters = [parameter.replace(kind=kind) for parameter in parameters]
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=_type_of(str(argument.type))))
    return inspect.Signature(parameters, __validate_parameters__=False)


def _type_of(text: str) -> Any:
    if text.startswith("Optional["):
        inner: Any = _type_of(text.removeprefix("Optional[").removesuffix("]"))
        return inner | None
    if text.startswith("List["):
        item: Any = _type_of(text.removeprefix("List[").removesuffix("]"))
        return list[item]
    return _TYPES.get(text, Any)


def _binds(signature: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _accepts(signature: inspect.Signature, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    if not _binds(signature, args, kwargs):
        return False
    given = signature.bind(*args, **kwargs).arguments
    return all(type_matches(signature.parameters[name].annotation, kind) for name, kind in given.items())


def _defaults_of(pair: ArgsKwargsPair | None, given: Mapping[str, Any]) -> str:
    # Where they are equal, it does not matter which overload is meant.
    return repr(pair and {name: "given" if name in given else value for name, value in pair.kwargs.items()})


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], only_kwargs: bool
) -> ArgsKwargsPair | None:
    if any(parameter.kind not in _KINDS for parameter in signature.parameters.values()):
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    count = 0 if only_kwargs else len(args)
    items = list(bound.arguments.items())
    return ArgsKwargsPair(tuple([value for _, value in items[:count]]), dict(items[count:]))
