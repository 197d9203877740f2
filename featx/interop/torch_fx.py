"""Turn graphs and graph modules of featx into those of torch.fx, and back.

What torch.fx's code cannot hold stands in helper nodes, which are marked in `node.meta` and go away on the way back.
"""

from __future__ import annotations

from typing import cast, overload

import torch
import torch.fx

from featx.errors import ArgumentTypeError
from featx.interop.checked import check_code
from featx.interop.from_graph import read_graph
from featx.interop.to_graph import TorchGraph
from featx.ir.graph import Graph
from featx.module import GraphModule


@overload
def to_torch_fx(module: GraphModule, *, graph: Graph | None = None) -> torch.fx.GraphModule: ...
@overload
def to_torch_fx(module: Graph) -> torch.fx.Graph: ...
def to_torch_fx(module: GraphModule | Graph, *, graph: Graph | None = None) -> torch.fx.GraphModule | torch.fx.Graph:
    """Return a torch.fx.GraphModule that computes what `module` does, or a torch.fx.Graph for a Graph.

    Nodes, their names, order, arguments, types and `meta` are the same; values in `meta` are shared. Submodules,
    parameters and buffers are shared, also submodules that are graph modules of featx. `module` is not changed.
    O(nodes + edges + modules).

    Literals that torch.fx cannot write (tensors, sizes, functions) become attributes that helper nodes read; other
    helper nodes give an argument a second name where torch.fx's code would assign it. Functions that it would call by a
    wrong name are in a `Named`. `from_torch_fx` takes all that away.

    The code puts the gradient mode and autocast back as featx's does, also after an error; an Interpreter does not.
    torch.fx pickles a module by tracing its code again and so loses writes in place, switched modes and what was
    decided on `training`: pickle the module of featx instead.

    Args:
        module: what to convert; of a `DualGraphModule` the graph of its present mode.
        graph: convert this graph, on the submodules of `module`: `extractor.eval_graph`, for example.

    Raises:
        ArgumentTypeError: torch.fx's code cannot express an argument, a target or a type; the message names the node.
        GraphError: the graph is malformed, or uses names that torch.fx's code gives another meaning.
        TargetError: torch.fx.GraphModule needs the name of an attribute that the graph reads.
    """
    given = cast(object, module)
    if isinstance(given, Graph):
        conversion = TorchGraph(given, None)
        if given.root.prev.op == "output":
            check_code(conversion.result, None)
        return conversion.result
    if not isinstance(given, GraphModule):
        raise ArgumentTypeError(
            f"to_torch_fx takes a featx.GraphModule or featx.Graph, got {type(given).__name__}; trace a model first"
        )
    return TorchGraph(given.graph if graph is None else graph, given).module(given)


@overload
def from_torch_fx(module: torch.fx.GraphModule, *, graph: torch.fx.Graph | None = None) -> GraphModule: ...
@overload
def from_torch_fx(module: torch.fx.Graph) -> Graph: ...
def from_torch_fx(
    module: torch.fx.GraphModule | torch.fx.Graph, *, graph: torch.fx.Graph | None = None
) -> GraphModule | Graph:
    """Return a featx.GraphModule that computes what a torch.fx.GraphModule does, or a featx.Graph for a torch.fx.Graph.

    As `to_torch_fx`, the other way; what that added is taken away. The graph counts, also where the code was not
    compiled again since it was edited. O(nodes + edges + modules).

    Args:
        module: what to convert; of torchvision's extractor the graph of its present mode.
        graph: convert this graph, on the submodules of `module`.

    Raises:
        ArgumentTypeError: torch.fx generates the code in a way of its own (`set_codegen`, `on_generate_code`).
        GraphError: the graph is malformed, or reads a `setitem` node.
        TargetError: the module lacks a target of the graph.
    """
    given = cast(object, module)
    if isinstance(given, torch.fx.Graph):
        return read_graph(given, None)
    if not isinstance(given, torch.fx.GraphModule):
        raise ArgumentTypeError(
            f"from_torch_fx takes a torch.fx.GraphModule or torch.fx.Graph, got {type(given).__name__}; "
            "trace a model with featx.trace instead"
        )
    converted = read_graph(given.graph if graph is None else graph, given)
    result = GraphModule(given, converted, type(given).__name__)
    result.meta.update(vars(given).get("meta", {}))  # torchvision's extractor has none
    return result
