"""Turn the signature of a forward function into placeholders, and fix those inputs that have concrete values."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.errors import ArgumentTypeError, TraceError
from featx.ir.node import NO_KWARGS
from featx.tracing.guards.input_checks import check_is_none, check_is_same
from featx.tracing.nodes.proxy import Proxy
from featx.tracing.nodes.value_types import type_of_option

if TYPE_CHECKING:
    from featx.tracing.symbolic.tracer import Tracer

_EMPTY = inspect.Parameter.empty


class PHBase:
    """Marks, inside `concrete_args`, an input that stays open."""

    def __repr__(self) -> str:
        return "PH"


PH = PHBase()


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function`.

    Raises:
        TraceError: it has none that Python can see.
    """
    try:
        return inspect.signature(function)
    except ValueError as error:
        name = getattr(function, "__name__", "f")
        raise TraceError(
            f"{function!r} has no Python signature to make inputs of; trace lambda x: {name}(x)"
        ) from error


def bind_inputs(
    tracer: Tracer,
    function: Callable[..., Any],
    signature: inspect.Signature,
    concrete_args: Mapping[str, Any] | tuple[Any, ...] | None,
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """Make a placeholder for each parameter of `function`; return what to call, and with what.

    A parameter in `concrete_args` keeps its placeholder, has its value during the trace, and is checked at run time to
    have it then; `PH` inside a nested value leaves that place open.

    Raises:
        TraceError: `concrete_args` names a parameter that `function` does not have.
    """
    parameters = list(signature.parameters.values())
    concrete = _by_name(concrete_args, parameters, function)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    rest: list[Any] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL or parameter.kind is parameter.VAR_KEYWORD:
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            rest.append(tracer.create_proxy("placeholder", stars + parameter.name, (), {}))
            continue
        value = _Input(tracer, parameter).value(concrete)
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    if rest:
        return _with_plain_rest(function), [*args, *kwargs.values(), *rest], {}
    return function, args, kwargs


def _by_name(
    concrete_args: Mapping[str, Any] | tuple[Any, ...] | None,
    parameters: list[inspect.Parameter],
    function: Callable[..., Any],
) -> dict[str, Any]:
    names = [parameter.name for parameter in parameters]
    if isinstance(concrete_args, tuple):
        if len(concrete_args) != len(names):
            raise TraceError(f"concrete_args has {len(concrete_args)} values for the {len(names)} inputs {names}")
        return dict(zip(names, concrete_args, strict=True))
    concrete = dict(concrete_args or {})
    unknown = [name for name in concrete if name not in names]
    if unknown:
        owner = getattr(function, "__qualname__", repr(function))
        raise TraceError(f"concrete_args names {unknown}, but {owner} takes {names}")
    return concrete


class _Input:
    """One parameter of the traced function."""

    def __init__(self, tracer: Tracer, parameter: inspect.Parameter) -> None:
        self._tracer = tracer
        self._parameter = parameter
        self._name = parameter.name

    def value(self, concrete: dict[str, Any]) -> Any:
        parameter = self._parameter
        annotation = None if parameter.annotation is _EMPTY else parameter.annotation
        default = () if parameter.default is _EMPTY else (parameter.default,)
        is_fixed = self._name in concrete
        is_option = not is_fixed and self._tracer.specialize_options and _is_option(parameter.default)
        if annotation is None and is_option:
            annotation = type_of_option(parameter.default)
        # torch.fx numbers the placeholder of a fixed input; its name in the signature stays.
        name = f"{self._name}_1" if is_fixed else None
        proxy = self._tracer.create_proxy("placeholder", self._name, default, {}, name, annotation)
        if parameter.kind is parameter.KEYWORD_ONLY:
            proxy.node.meta["keyword_only"] = True
        if is_option:
            check: Any = check_is_none if parameter.default is None else check_is_same
            arguments = (
                (proxy.node, *default, self._name) if parameter.default is not None else (proxy.node, self._name)
            )
            self._tracer.create_node("call_function", check, arguments, NO_KWARGS)
            return parameter.default
        return self._fix(proxy, concrete[self._name], self._name) if is_fixed else proxy

    def _fix(self, proxy: Proxy, value: Any, where: str) -> Any:
        if isinstance(value, PHBase):
            return proxy
        if isinstance(value, dict):
            self._check_length(proxy, cast(dict[Any, Any], value), where)
            items = cast(dict[Any, Any], value).items()
            return {key: self._fix(proxy[key], item, f"{where}[{key!r}]") for key, item in items}
        if isinstance(value, (list, tuple)):
            self._check_length(proxy, cast(list[Any], value), where)
            items = [self._fix(proxy[i], item, f"{where}[{i}]") for i, item in enumerate(cast(list[Any], value))]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, torch.Tensor):
            raise ArgumentTypeError(f"concrete_args fixes {where} to a tensor; pass it as an input or a buffer instead")
        if isinstance(value, (bool, int, float, str)):
            message = f"{where} has been specialized to have value {value} but got another value"
            self._tracer.create_proxy("call_function", torch._assert, (operator.eq(proxy, value), message), {})
        elif value is None:
            self._tracer.create_node("call_function", check_is_none, (proxy.node, where), NO_KWARGS)
        else:
            self._tracer.create_node("call_function", check_is_same, (proxy.node, value, where), NO_KWARGS)
        return value

    def _check_length(self, proxy: Proxy, value: Any, where: str) -> None:
        length = self._tracer.create_proxy("call_function", len, (proxy,), {})
        message = f"{where} was traced with {len(value)} items and has another number of them now"
        self._tracer.create_proxy("call_function", torch._assert, (operator.eq(length, len(value)), message), {})


def _is_option(default: object) -> bool:
    return default is None or isinstance(default, (bool, str))


def _with_plain_rest(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with `*args` and `**kwargs` as plain parameters, so that each can be one traced value."""
    bound_to = function.__self__ if isinstance(function, MethodType) else None
    plain = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(plain, FunctionType) or hasattr(plain, "__wrapped__"):
        raise TraceError(
            f"{getattr(function, '__qualname__', function)} takes * or ** and is not a plain Python function; "
            "trace with an example, featx.trace(model, **inputs), or trace a function with named inputs that calls it"
        )
    code = plain.__code__
    takes = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    flat: CodeType = code.replace(
        co_flags=code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS),
        co_argcount=code.co_argcount + code.co_kwonlyargcount + takes,
        co_posonlyargcount=0,
        co_kwonlyargcount=0,
    )
    copy = FunctionType(flat, plain.__globals__, plain.__name__, None, plain.__closure__)
    return copy if bound_to is None else MethodType(copy, bound_to)
