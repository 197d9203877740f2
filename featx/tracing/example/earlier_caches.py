"""Find caches that calls of the model itself have filled before a trace, such as the anchors of a detector.

A class or its `__init__` sets `shape = None`, and `forward` computes the anchors where the shape of its input is
another one than in the call before. For a model that has run at the size of the example, a graph would have
the anchors of that size as constants. So it is traced as if it had not run, where that is shown to be the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from featx.ir.equality import is_same
from featx.ir.modules import walk_modules
from featx.ir.torch_layers import is_torch_layer
from featx.rebuilding import NO_VALUE
from featx.tracing.example.plain_run import run_plainly
from featx.tracing.replica.model_context import ModelContext
from featx.tracing.replica.replica import OF_CLASS
from featx.tracing.side_effects.state_checks import Attribute
from featx.tracing.source.attributes import assigned_by, constants_of_init
from featx.tree import tree_leaves, tree_map

_COMPARABLE = (int, float, str, tuple, type(None), torch.dtype, torch.device, torch.Tensor)


def caches_filled_before(
    context: ModelContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[Attribute, Any]:
    """Return the attributes in which earlier calls have cached what depends on sizes alone, and what was there before.

    These are attributes that `forward` assigns and for which the class has a value of its own, or `__init__` a
    constant. In both modes the model must return the same, and leave the same in them, with what is in them and with
    what was, bit for bit. What it computes anew in eval mode may depend on no parameter and on no value of the inputs.
    O(modules); five more runs on the example, for real, if there are such attributes.

    Args:
        context: what is traced.
        args: the example.
        kwargs: the example, by name.
    """
    before = {
        (path, name): value
        for path, module in walk_modules(context.root)
        if not is_torch_layer(type(module))
        for name, value in _before_calls(module).items()
    }
    if not before or _has_no_values(context, (args, kwargs)):
        return {}
    inputs = args, kwargs
    return before if _are_filled_anew(context, inputs, before) and _trains_alike(context, inputs, before) else {}


def _are_filled_anew(context: ModelContext, inputs: Any, before: Mapping[Attribute, Any]) -> bool:
    """Say whether forward fills all caches anew in eval mode, with what it would find there, and returns the same."""
    names = sorted(before)
    warm = _run(context, names, inputs, {}, training=False)
    cold = _run(context, names, inputs, before, training=False)
    varied = _run(context, names, _with_other_values(inputs), before, training=False, varies=True)
    if warm is None or cold is None or varied is None:
        return False
    returns_the_same = _are_equal(warm.result, cold.result) and all(map(_are_alike, warm.caches, cold.caches))
    return returns_the_same and _are_equal(cold.caches, varied.caches)


def _trains_alike(context: ModelContext, inputs: Any, before: Mapping[Attribute, Any]) -> bool:
    """Say whether forward does the same in train mode; it may leave the caches alone there, and return the same."""
    names = sorted(before)
    warm, cold = (_run(context, names, inputs, start, training=True) for start in ({}, before))
    if warm is None or cold is None:
        return warm is cold  # the model may take other inputs in train mode, such as targets
    return _are_equal(warm.result, cold.result) and all(
        _are_alike(warm.caches[place], cold.caches[place])
        for place in range(len(names))
        if warm.are_assigned[place] or cold.are_assigned[place]
    )


class _Run(NamedTuple):
    """What a copy of the model has returned, and what it has afterwards in the attributes that may be caches."""

    result: Any
    caches: list[Any]
    are_assigned: list[bool]


def _run(
    context: ModelContext, names: list[Attribute], inputs: Any, before: Mapping[Attribute, Any], *, training: bool,
    varies: bool = False,
) -> _Run | None:  # fmt: skip
    """Run a copy of the model in a mode, with some attributes as they were before; return None where that fails.

    With `varies`, what is in the state dict has other values, which shows whether a cache depends on it.
    """
    replica, _ = context.replica(training, "all")
    for tensor in _saved_tensors(replica.root) if varies else ():
        tensor.detach().copy_(_other_value(tensor))
    replica.put_back(before)
    members = [(replica.root.get_submodule(path).__dict__, name) for path, name in names]
    start = [held.get(name, NO_VALUE) for held, name in members]
    with torch.no_grad():
        result, error = run_plainly(context, replica.root, *inputs)
    caches = [held.get(name, NO_VALUE) for held, name in members]
    are_assigned = [now is not then or isinstance(now, dict) for then, now in zip(start, caches, strict=True)]
    caches = [cast(Any, cache).copy() if isinstance(cache, dict) else cache for cache in caches]
    replica.drop()
    return _Run(result, caches, are_assigned) if error is None else None


def _saved_tensors(root: nn.Module) -> Iterator[torch.Tensor]:
    yield from root.parameters()
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _before_calls(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that forward may have assigned, with what they were before that.

    That is what the class has for them, or a constant of `__init__`; of a dict that is none, an empty one.
    """
    kind, found = type(module), dict[str, Any]()
    for name in (_class_values(kind) | constants_of_init(kind).keys()) & module.__dict__.keys():
        present = module.__dict__[name]
        if isinstance(inspect.getattr_static(kind, name, NO_VALUE), _COMPARABLE):
            found[name] = OF_CLASS
        else:
            value = constants_of_init(kind).get(name, NO_VALUE)
            is_empty_dict = isinstance(present, dict) and not present
            if value is not NO_VALUE and value is not present and not is_empty_dict:
                found[name] = value
    forward = inspect.getattr_static(kind, "forward", None)
    if not found or not isinstance(forward, FunctionType):
        return {}
    # Asked last: all code that forward reaches is read for it.
    assigned = assigned_by(forward, kind) or frozenset()
    return {name: value for name, value in found.items() if name in assigned}


@functools.lru_cache(maxsize=4096)
def _class_values(kind: type) -> frozenset[str]:
    """Return the names of what a class, or a base of it, has as a value of its own."""
    return frozenset(
        name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, _COMPARABLE)
    )


def _has_no_values(context: ModelContext, inputs: Any) -> bool:
    tensors = [*context.root.parameters(), *context.root.buffers(), *tree_leaves(inputs)]
    return torch.is_inference_mode_enabled() or any(each.is_meta for each in tensors if isinstance(each, torch.Tensor))


def _with_other_values(inputs: Any) -> Any:
    return tree_map(lambda value: _other_value(value) if isinstance(value, torch.Tensor) else value, inputs)


def _other_value(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * 0.5 + 0.25
    return tensor.flip(-1) if tensor.dim() else tensor.clone()


def _are_alike(warm: Any, cold: Any) -> bool:
    """Say whether what a call has found in a cache is what it fills it with.

    In a dict there may be nothing else: somebody may have put an entry there that holds for other inputs.
    """
    if isinstance(warm, dict) and isinstance(cold, dict):
        held, filled = cast(dict[Any, Any], warm), cast(dict[Any, Any], cold)
        return held.keys() == filled.keys() and all(_are_equal(held[key], value) for key, value in filled.items())
    return _are_equal(warm, cold)


def _are_equal(one: Any, other: Any) -> bool:
    """Say whether two values hold the same tensors, bit for bit, and plain values, and nothing else."""
    leaves = list(tree_leaves(one))
    return all(isinstance(leaf, _COMPARABLE) for leaf in leaves) and is_same(leaves, list(tree_leaves(other)))
