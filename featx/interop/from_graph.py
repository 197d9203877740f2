"""Turn a graph of torch.fx into one of featx: what only torch.fx's code needs goes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch.fx
from torch.fx.graph import CodeGen

from featx.errors import ArgumentTypeError, ForeignNodeError
from featx.interop.generated import KeywordOnlyCode, put_modes_back
from featx.interop.meta import HELPER, TRACER_CLASS, WRAPPED_HERE, Translation
from featx.interop.named import Named
from featx.interop.written import refuse_read_setitem
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.verify import find_attribute


def read_graph(graph: torch.fx.Graph, module: torch.fx.GraphModule | None) -> Graph:
    """Return a graph of torch.fx, whose targets `module` has, as one of featx; see `from_torch_fx`."""
    code = graph._codegen
    if type(code) not in (CodeGen, KeywordOnlyCode) or code._body_transformer not in (None, put_modes_back):
        raise ArgumentTypeError(
            f"the graph has code of its own ({type(code).__name__} or on_generate_code), which takes or returns "
            "something else than its nodes say; graph.set_codegen(torch.fx.graph.CodeGen()) takes that away"
        )
    result = Graph(tracer_cls=getattr(graph, TRACER_CLASS, None))
    values: dict[torch.fx.Node, Any] = {}

    def value_of(node: torch.fx.Node) -> Any:
        if node not in values:
            raise ForeignNodeError(f"'{node.name}' is read before it is computed, or belongs to another graph")
        return values[node]

    twins: dict[torch.fx.Node, Node] = {}
    for node in graph.nodes:
        refuse_read_setitem(node)
        helped = _helped_value(node, module, value_of)
        if helped is not None:
            values[node] = helped[0]
            continue
        args, kwargs = [torch.fx.map_arg(arguments, value_of) for arguments in (node.args, node.kwargs)]
        target = node.target.function if isinstance(node.target, Named) else node.target
        twin = result.create_node(node.op, target, args, kwargs, node.name, node.type)
        twin.name = node.name
        values[node] = twins[node] = twin
    translation = Translation(values, torch.fx.Node)
    for node, twin in twins.items():
        twin.meta = translation.meta(node.meta)
        if twin.meta.get("is_wrapped") == WRAPPED_HERE:
            del twin.meta["is_wrapped"]
        twin.meta.pop(HELPER, None)
    return result


def _helped_value(
    node: torch.fx.Node, module: torch.fx.GraphModule | None, value_of: Callable[[torch.fx.Node], Any]
) -> tuple[Any] | None:
    """Return what a helper node stands for, unless somebody has made another node of it."""
    shape: Any = (node.meta.get(HELPER), node.op, node.target, node.args)
    match shape:
        case "constant", "get_attr", str(path), _ if module is not None:
            return (find_attribute(module, path, cast(Any, node)),)
        case "alias", "call_function", operator.getitem, ((value,), 0):
            return (torch.fx.map_arg(value, value_of),)
        case "built", "call_function", kind, args if isinstance(kind, (type, Named)):
            return (kind(*torch.fx.map_arg(args, value_of)),)
        case _:
            return None
