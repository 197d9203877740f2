"""Trace a model for feature extraction: torchvision's leaf policy, in train or eval mode, the model as before after."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from featx.errors import ArgumentTypeError
from featx.ir.graph import Graph
from featx.tracing.scope import walk_modules
from featx.tracing.symbolic import Tracer


class FeatureTracer(Tracer):
    """A symbolic tracer whose leaf modules can be listed.

    Args:
        leaf_modules: classes of modules that are one node each, besides those of torch.nn and torchvision.ops.
        autowrap_modules: as for `Tracer`; math and torchvision.ops are added.
        autowrap_functions: as for `Tracer`.
        param_shapes_constant: as for `Tracer`.
    """

    specialize_options = True

    def __init__(
        self,
        autowrap_modules: tuple[ModuleType, ...] = (),
        autowrap_functions: tuple[Callable[..., Any], ...] = (),
        param_shapes_constant: bool = False,
        leaf_modules: list[type[nn.Module]] | tuple[type[nn.Module], ...] = (),
    ) -> None:
        # A model that uses torchvision.ops has imported it; others need not have torchvision at all.
        operators = sys.modules.get("torchvision.ops")
        modules = (*autowrap_modules, math, *((operators,) if operators else ()))
        super().__init__(tuple(dict.fromkeys(modules)), tuple(autowrap_functions), param_shapes_constant)
        members = vars(operators).values() if operators else ()
        own = [member for member in members if isinstance(member, type) and issubclass(member, nn.Module)]
        self._leaf_types = (*leaf_modules, *own)
        self._is_leaf: dict[type[nn.Module], bool] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether a call of `m` is one node."""
        kind = type(m)
        known = self._is_leaf.get(kind)
        if known is None:
            known = isinstance(m, self._leaf_types) or super().is_leaf_module(m, module_qualified_name)
            self._is_leaf[kind] = known
        return known


def trace_in_mode(
    model: nn.Module, tracer_kwargs: Mapping[str, Any] | None, concrete_args: dict[str, Any] | None
) -> Graph:
    """Trace `model`, in the mode in which it is, with a `FeatureTracer`.

    Raises:
        ArgumentTypeError: `tracer_kwargs` has a key that the tracer does not know.
        TraceError: the model cannot be traced symbolically.
    """
    try:
        tracer = FeatureTracer(**(tracer_kwargs or {}))
    except TypeError as error:
        raise ArgumentTypeError(
            "tracer_kwargs may have autowrap_modules, autowrap_functions, param_shapes_constant and leaf_modules: "
            f"{error}"
        ) from error
    return tracer.trace(model, concrete_args)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Generator[None]:
    """Put `model` into train or eval mode; afterwards each submodule has its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    try:
        model.train(training)
        yield
    finally:
        if model.training != was_training:
            model.train(was_training)  # a model may do more than set flags here
        for module, mode in modes:
            module.__dict__["training"] = mode


def training_flags(model: nn.Module) -> dict[str, bool]:
    """Return which mode each submodule is in, by path; the model itself has the path ""."""
    return {path: module.training for path, module in walk_modules(model)}


def check_model(model: object) -> nn.Module:
    """Return `model` if it is a module.

    Raises:
        ArgumentTypeError: it is not.
    """
    if hasattr(model, "_orig_mod"):
        raise ArgumentTypeError("model is compiled by torch.compile; pass model._orig_mod, and compile the extractor")
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"model must be an nn.Module, got {model!r:.80}; pass an instance, such as torchvision.models.resnet50()"
        )
    return model
