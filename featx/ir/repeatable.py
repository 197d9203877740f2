"""Tell which calls only compute a value, so that one run may stand for another."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from featx.ir.module_effects import module_draws, module_writes_state
from featx.ir.modules import modules_of
from featx.ir.names import has_borrowed_name, qualified_name
from featx.ir.operator_facts import facts_of, facts_of_call, is_magic
from featx.ir.torch_layers import is_torch_layer
from featx.libraries import PURE_OPERATORS

if TYPE_CHECKING:
    from featx.ir.effects import CallEffects, Effects
    from featx.ir.node import Node

# Functions of Python, and methods of tensors that are no operators, whose result depends on their arguments alone.
_BUILTINS = frozenset("abs bool complex divmod float getattr int len max min pow round slice".split())
_METHODS = frozenset(
    "bfloat16 bool byte cdouble cfloat char double float half int long ndimension nelement new_tensor short "
    "type".split()
)


class RepeatableCalls:
    """The calls of one graph that compute the same value whenever they run on the same values in the same modes.

    They do nothing else. Only what is known is among them: of functions and modules those of torch and Python. The
    value may be a view of an input, and a call may depend on the gradient mode and on autocast.
    """

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._targets: dict[tuple[str, Any], bool] = {}

    def has(self, node: Node) -> bool:
        """Say whether `node` is one of them; reads of attributes are. O(its arguments)."""
        effects = self._effects.of(node)
        if self._effects.is_impure(node) or effects.is_opaque or may_write_literal(node, effects):
            return False
        if node.op == "call_module":
            module = self._effects.module_of(node)
            return module is not None and is_known_module(module)
        key = (node.op, node.target)
        known = self._targets.get(key)
        if known is None:
            known = self._targets[key] = node.op == "get_attr" or _is_pure(node)
        return known


def is_known_module(module: nn.Module) -> bool:
    """Say whether what `module` does when it is called whole is known: all of it is torch's, and nothing is hooked.

    Then it computes its result from its inputs, its parameters and buffers, and its mode.
    """
    return not has_hooks(module) and all(
        "forward" not in part.__dict__ and (is_torch_layer(type(part)) or not module_writes_state(part))
        for part in modules_of(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Say whether `module` or one inside it has hooks, which who replaces it would lose."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in modules_of(module)
    )


def depends_on_mode(module: nn.Module) -> bool:
    """Say whether a known module may do something else in train mode than in eval mode."""
    return may_draw(module) or any(part.__dict__.get("track_running_stats") for part in modules_of(module))


def may_draw(module: nn.Module) -> bool:
    """Say whether a known module may draw random numbers in one of train and eval mode."""
    return any(module_draws(part, training=True) for part in modules_of(module))


def may_write_literal(node: Node, effects: CallEffects) -> bool:
    """Say whether a call may write a tensor that stands in its arguments; its effects are those on nodes."""
    values = (*node.args, *node.kwargs.values())
    if node.op == "get_attr" or not any(isinstance(value, torch.Tensor) for value in values):
        return False
    if node.op == "call_module" or effects.is_opaque or "out" in node.kwargs or "inplace" in _parameters(node.target):
        return True
    return facts_of_call(node).writes_first


def _parameters(target: Any) -> Iterable[str]:
    return inspect.signature(target).parameters if inspect.isfunction(target) else ()


def _is_pure(node: Node) -> bool:
    if node.op == "call_method":
        if is_magic(node.target):
            return _is_python_operator(node.target[2:-2]) or _is_python_operator(node.target[2:-2].removeprefix("r"))
        return node.target in _METHODS or _is_operator(node.target)
    function: Callable[..., Any] = node.target
    if has_borrowed_name(function):
        return False
    name = qualified_name(function)
    module, _, short = name.rpartition(".")
    if isinstance(function, torch._ops.OpOverload):
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        is_pure = function.namespace in PURE_OPERATORS or _is_operator(function._schema.name.removeprefix("aten::"))
        return is_pure and not is_random
    if isinstance(function, torch._ops.OpOverloadPacket):
        return name.startswith("torch.ops.aten.") and _is_operator(short)
    if module in ("", "operator"):
        return _is_python_operator(short) if module else short in _BUILTINS
    if module in ("math", "torch.functional", "torch.nn.functional"):
        return not short.endswith("_") and not facts_of(short).writes_statistics
    return module.split(".")[0] == "torch" and _is_operator(short)


def _is_python_operator(name: str) -> bool:
    return hasattr(operator, name) and name != "call" and not facts_of(name).writes_first


def _is_operator(name: str) -> bool:
    """Say whether torch has an operator of this name that makes a tensor or tells something of one."""
    if name.endswith("_") or facts_of(name).writes_statistics:
        return False
    schemas: list[Any] = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return any(
        schema.returns and any("Tensor" in str(value.type) for value in (*schema.arguments, *schema.returns))
        for schema in schemas
    )
