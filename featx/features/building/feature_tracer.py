"""The tracer of extractors, with its policy which modules are one node, and the models that it takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from featx.errors import ArgumentTypeError
from featx.ir.graph import Graph
from featx.libraries import torchvision_operators
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.nodes.module_output import add_apart, mark_output
from featx.tracing.nodes.proxy import Proxy
from featx.tracing.nodes.scope import requested_by
from featx.tracing.symbolic.tracer import Tracer


class FeatureTracer(Tracer):
    """A symbolic tracer whose leaf modules can be listed.

    Args:
        leaf_modules: classes of modules that are one node each, besides those of torch.nn and torchvision.ops.
        autowrap_modules: as for `Tracer`; math and torchvision.ops are added.
        autowrap_functions: as for `Tracer`.
        param_shapes_constant: as for `Tracer`.
    """

    specialize_options = True
    shows_names = True

    def __init__(
        self,
        autowrap_modules: tuple[ModuleType, ...] = (),
        autowrap_functions: tuple[Callable[..., Any], ...] = (),
        param_shapes_constant: bool = False,
        leaf_modules: list[type[nn.Module]] | tuple[type[nn.Module], ...] = (),
    ) -> None:
        # A model that uses torchvision.ops has imported it; others need not have torchvision at all.
        operators = torchvision_operators()
        modules = (*autowrap_modules, math, *((operators,) if operators else ()))
        super().__init__(tuple(dict.fromkeys(modules)), tuple(autowrap_functions), param_shapes_constant)
        members = vars(operators).values() if operators else ()
        own = [member for member in members if isinstance(member, type) and issubclass(member, nn.Module)]
        self._given_leaf_types = tuple(leaf_modules)
        self._leaf_types = (*leaf_modules, *own)
        self._is_leaf: dict[type[nn.Module], bool] = {}
        self._opened_types: tuple[type[nn.Module], ...] = ()
        # The paths of modules whose outputs are marked in the graph.
        self.requested: frozenset[str] = frozenset()
        # Those of which what a call returns is told from the same value elsewhere, as an edit changes it alone.
        self.own_output: frozenset[str] = frozenset()

    def open_operators(self) -> None:
        """Look into the modules of torchvision.ops too, which are one node each for torchvision."""
        self._leaf_types, self._is_leaf = self._given_leaf_types, {}

    def open_stacks(self) -> None:
        """Look into torch's modules that only call layers in a row, which are one node each for torchvision."""
        self._opened_types, self._is_leaf = (nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer), {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether a call of `m` is one node."""
        kind = type(m)
        known = self._is_leaf.get(kind)
        if known is None:
            known = isinstance(m, self._leaf_types) or (
                not isinstance(m, self._opened_types) and super().is_leaf_module(m, module_qualified_name)
            )
            self._is_leaf[kind] = known
        return known

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of a module, and mark what it returns where that is asked for."""
        result = super().call_module(m, forward, args, kwargs)
        path = self.path_of_module(m)
        if requested_by(path, self.requested, self.scope.stack) and not self.is_leaf_module(m, path):
            if path in self.own_output and isinstance(result, Proxy):
                return self.proxy(add_apart(self.graph, self.create_arg(result), path))
            mark_output(self.graph, self.create_arg(result), path)
        return result

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        """Trace as `Tracer`, and mark what the root returns where that is asked for."""
        graph = super().trace(root, concrete_args)
        if "" in self.requested:
            output = graph.output_node()
            with graph.inserting_before(output):
                mark_output(graph, output.args[0], "", output.prev)
        return graph

    def on_example(self, opened: frozenset[str] | None = None) -> ExampleTracer:
        """Return a tracer with the same policy that follows an example."""
        modules, functions = self._autowrap_modules, self._autowrap_functions
        tracer = ExampleTracer(
            self.is_leaf_module, modules, functions, opened=opened, requested=self.requested,
            own_output=self.own_output, keep_output=False, training=self.training,
        )  # fmt: skip
        tracer.reads = self.reads
        return tracer


def check_model(model: object) -> nn.Module:
    """Return `model` if it is a module.

    Raises:
        ArgumentTypeError: it is not, or its `train` does not set a mode.
    """
    if hasattr(model, "_orig_mod"):
        raise ArgumentTypeError("model is compiled by torch.compile; pass model._orig_mod, and compile the extractor")
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            "model was made by torch.jit, and no trace sees its code; make the extractor of the model that it was made "
            "of, and script the extractor"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"model must be an nn.Module, got {model!r:.80}; pass an instance, such as torchvision.models.resnet50()"
        )
    reason: str | None = getattr(type(model), "why_not_traced", None)
    if reason is not None:
        raise ArgumentTypeError(reason)
    default = next((each.default for each in inspect.signature(model.train).parameters.values()), True)
    if not isinstance(default, bool) and default is not inspect.Parameter.empty:
        raise ArgumentTypeError(
            f"{type(model).__name__}.train is no nn.Module.train, which sets the mode; pass the network inside of it, "
            "such as model.model"
        )
    return model
