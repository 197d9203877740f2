"""Fusion, removal of dropout and cutting out of a part, as functions of any module."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from featx.interpret.transformer import Transformer
from featx.ir.graph import Graph
from featx.ir.node import Node, Target
from featx.module import GraphModule
from featx.passes.fuse import fuse_conv_bn
from featx.traced import symbolic_trace


def fuse(model: nn.Module, inplace: bool = False, no_trace: bool = False) -> GraphModule:
    """Return `model`, traced, with batch norms folded into the layers before them; see `featx.passes.fuse_conv_bn`.

    A model that is a GraphModule already is not traced with `no_trace`, and is itself changed with `inplace`. The
    weights of `model` are not changed in any case.

    Raises:
        PassError: `model` is in train mode.
        TraceError: it cannot be traced.
    """
    module = model if no_trace and isinstance(model, GraphModule) else symbolic_trace(model)
    if module is model and not inplace:
        module = copy.deepcopy(module)
    fuse_conv_bn(module)
    return module


def remove_dropout(model: nn.Module) -> GraphModule:
    """Return `model`, traced, without its `nn.Dropout` modules, in whichever mode they are. `model` is not changed."""
    return _DropoutRemover(symbolic_trace(model)).transform()


class _DropoutRemover(Transformer):
    def call_module(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(self.fetch_attr(str(target)), nn.Dropout):
            return args[0] if args else kwargs["input"]
        return super().call_module(target, args, kwargs)


def extract_subgraph(
    orig_module: nn.Module, nodes: Iterable[Node], inputs: Iterable[Node], outputs: Sequence[Node]
) -> GraphModule:
    """Return a module of copies of exactly `nodes`: it takes the values of `inputs` and returns a list of `outputs`.

    `featx.passes.extract_subgraph` finds by itself what the outputs need, what writes into it included.

    Raises:
        GraphError: a node reads one that is neither among `nodes` before it nor an input.
    """
    graph = Graph()
    copies: dict[Node, Node] = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    graph.lint()
    return GraphModule(orig_module, graph)


def matches_module_pattern(pattern: Iterable[type], node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Say whether `node` and the node that it reads call modules of the two classes in `pattern`, last one last."""
    if not node.args or not isinstance(node.args[0], Node):
        return False
    return all(
        current.op == "call_module" and type(modules.get(current.target)) is kind
        for kind, current in zip(pattern, (node.args[0], node), strict=True)
    )


def replace_node_module(node: Node, modules: dict[str, Any], new_module: nn.Module) -> None:
    """Put `new_module` at the path that `node` calls, into the parent module and into `modules`, which has it too."""
    parent, _, name = node.target.rpartition(".")
    modules[node.target] = new_module
    setattr(modules[parent], name, new_module)
