"""Write a module of torch.nn as the expression that makes one like it."""

from __future__ import annotations

import inspect
import math
from typing import Any, cast

import torch
from torch import nn

# What a constructor takes from elsewhere than an attribute of its name.
_ELSEWHERE: dict[tuple[type[nn.Module], str], str] = {
    (nn.MultiheadAttention, "bias"): "in_proj_bias",
    (nn.MultiheadAttention, "add_bias_kv"): "bias_k",
}
_PLACES = frozenset({"device", "dtype"})
# State of each module that its constructor does not take.
_STATE = frozenset({"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


def constructor_of(module: nn.Module) -> str | None:
    """Return the expression `nn.Conv2d(3, 8, 3)` for a module, or None where none makes one like it. O(its attributes).

    It is None for modules of other libraries, and for what somebody has changed: hooks, attributes, parametrizations.
    The tensors of what the expression makes are on the default device and have the default dtype; they have the shapes
    of those of the module.
    """
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind:
        return None
    for is_short in (True, False):
        arguments = _arguments(module, is_short=is_short)
        if arguments is not None and _makes_alike(_call(kind, arguments), module):
            for name in [name for name in arguments if not name.startswith("*")]:
                fewer = {other: text for other, text in arguments.items() if other != name}
                arguments = fewer if _makes_alike(_call(kind, fewer), module) else arguments
            return _call(kind, arguments)
    return None


def _arguments(module: nn.Module, *, is_short: bool) -> dict[str, str] | None:
    """Return the arguments of the constructor as texts, by name, those by position under a name with a star.

    Short ones have 3 for (3, 3), which most constructors take.
    """
    written: dict[str, str] = {}
    for parameter in _parameters(type(module)):
        value = _argument(module, parameter.name, parameter.default)
        if is_short and isinstance(value, tuple) and value and all(item == value[0] for item in value):
            value = value[0]
        is_required = parameter.default is parameter.empty
        if not is_required and _is_same(value, parameter.default):
            continue
        text = _literal(value)
        if text is None:
            return None
        written[f"*{parameter.name}" if is_required else parameter.name] = text
    return written


def _parameters(kind: type[nn.Module]) -> list[inspect.Parameter]:
    is_recurrent = kind in (nn.LSTM, nn.GRU)  # whose own constructors take anything
    constructor = nn.RNNBase.__init__ if is_recurrent else kind.__init__
    parameters = list(inspect.signature(constructor).parameters.values())[2 if is_recurrent else 1 :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each for each in parameters if each.kind not in variadic and each.name not in _PLACES]


def _call(kind: type[nn.Module], arguments: dict[str, str]) -> str:
    texts = [text if name.startswith("*") else f"{name}={text}" for name, text in arguments.items()]
    return f"nn.{kind.__name__}({', '.join(texts)})"


def _argument(module: nn.Module, name: str, default: Any) -> Any:
    elsewhere = _ELSEWHERE.get((type(module), name))
    if elsewhere is not None:
        return getattr(module, elsewhere) is not None
    value = getattr(module, name, default)
    return value is not None if name == "bias" and not isinstance(value, bool) else value


def _is_same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _literal(value: Any) -> str | None:
    if isinstance(value, (tuple, list)):
        parts = [_literal(item) for item in cast("list[Any]", value)]
        if None in parts or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return None
        inside = ", ".join(cast("list[str]", parts))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(parts) == 1 else ''})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    return str(value) if isinstance(value, torch.dtype) else None


def _makes_alike(expression: str, module: nn.Module) -> bool:
    """Say whether the expression makes a module with the attributes, and the shapes of tensors, of this one."""
    try:
        with torch.device("meta"):
            made = eval(expression, {"nn": nn, "torch": torch})  # of literals and names of torch.nn alone
    except Exception:  # whatever a constructor raises: it does not take what the attributes have
        return False
    if _shapes(made) != _shapes(module):
        return False
    inside, twins = list(module.modules()), list(made.modules())
    return len(inside) == len(twins) and all(map(_has_same_attributes, inside, twins))


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, tensor.shape) for name, tensor in (*module.named_parameters(), *module.named_buffers())]


def _has_same_attributes(module: nn.Module, made: nn.Module) -> bool:
    """Say whether a module has the attributes of one that its constructor has made; marks of libraries may be more."""
    own, twin = _attributes(module), _attributes(made)
    is_alike = type(module) is type(made) and twin.keys() <= own.keys() and all(own[key] == twin[key] for key in twin)
    return is_alike and not any(hasattr(type(module), key) for key in own.keys() - twin.keys())


def _attributes(module: nn.Module) -> dict[str, Any]:
    values = {name: value for name, value in vars(module).items() if name not in _STATE}
    # Weak references to the weights, and lists of them, which recurrent layers keep.
    return {name: value for name, value in values.items() if not name.startswith("_flat_weight")}
