"""Turn a graph of featx into one of torch.fx, and its module into one that runs that."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.fx
from torch import nn

from featx.errors import ArgumentTypeError, GraphError, TargetError
from featx.interop.arguments import Arguments, add_node
from featx.interop.checked import check_code
from featx.interop.generated import KeywordOnlyCode, put_modes_back
from featx.interop.meta import HELPER, TRACER_CLASS, WRAPPED_HERE, Translation
from featx.interop.named import Named
from featx.interop.written import is_misread, is_misread_attribute, is_written, last_readers, refuse_read_setitem
from featx.interop.written_names import refuse_unwritten_names
from featx.ir.graph import Graph
from featx.ir.identifiers import plain_text
from featx.ir.names import identifier_of
from featx.ir.node import Node
from featx.ir.verify import verify
from featx.module import GraphModule


class TorchGraph:
    """A graph of torch.fx, `result`, that computes what `graph` does on what `module` has; see `to_torch_fx`."""

    def __init__(self, graph: Graph, module: GraphModule | None) -> None:
        verify(graph, module)
        if graph.code_transformer is not None:
            raise GraphError(
                "the graph edits its generated code (on_generate_code), which is not the code of torch.fx; "
                "convert it without that, and edit the code of the result"
            )
        self.result = torch.fx.Graph()
        setattr(self.result, TRACER_CLASS, graph.tracer_cls)
        self._twins: dict[Node, torch.fx.Node] = {}
        self._arguments = Arguments(graph, module, self.result, self._twins)
        self._last = last_readers(graph)
        for node in graph.nodes:
            try:
                self._twins[node] = self._convert(node)
            except ArgumentTypeError as error:
                raise ArgumentTypeError(f"torch.fx cannot hold node '{node.name}': {error}") from error
        self._copy_meta()
        self._choose_code(graph)

    def _convert(self, node: Node) -> torch.fx.Node:
        target, arguments = node.target, self._arguments
        if node.name == "self" or (node.op == "placeholder" and target.lstrip("*") == "self"):
            raise GraphError(f"node '{node.name}' has the name by which torch.fx's code calls the module; rename it")
        refuse_read_setitem(node)
        refuse_unwritten_names(node)
        if node.op == "call_function":
            target = Named(target) if is_misread_attribute(node) else arguments.function(target)
        if node.op == "placeholder":
            for default in node.args:
                if not is_written(default, nested=False):
                    raise ArgumentTypeError(
                        f"its default {default!r} cannot be written in the code of torch.fx; make it None, a number or "
                        "a string, or an attribute of the module"
                    )
        args = tuple([arguments.of(value) for value in node.args])
        if is_misread(node, self._last):
            args = (arguments.second_name(args[0], node), *args[1:])
        kwargs = {key: arguments.of(value) for key, value in node.kwargs.items()}
        return add_node(self.result, node.op, target, args, kwargs, node.name, node.type)

    def _copy_meta(self) -> None:
        translated = Translation(self._twins, Node)
        for node, twin in self._twins.items():
            twin.meta = translated.meta(node.meta)
            target = twin.target
            if isinstance(target, (FunctionType, Named)) and target.__module__.startswith("featx."):
                # Or torch.fx would go into the function when it traces the code again, as it does to unpickle it.
                twin.meta.setdefault("is_wrapped", WRAPPED_HERE)

    def _choose_code(self, graph: Graph) -> None:
        inputs = [node for node in graph.nodes if node.op == "placeholder" and node.meta.get("keyword_only")]
        switches = (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast)
        switches_modes = any(node.target in switches for node in graph.nodes if node.op == "call_function")
        if inputs or switches_modes:
            self.result.set_codegen(KeywordOnlyCode(frozenset([node.target for node in inputs])))
        if switches_modes:
            self.result.on_generate_code(lambda _: put_modes_back)

    def module(self, source: GraphModule) -> torch.fx.GraphModule:
        """Return a module that runs the new graph on what the old one has in `source`."""
        result = torch.fx.GraphModule(nn.Module(), torch.fx.Graph(), _class_name(source))
        _share(source, self._reads(result), result)
        for name, value in self._arguments.attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                result.register_buffer(name, value, persistent=False)
            else:
                setattr(result, name, value)
        result.meta.update(source.meta)
        check_code(self.result, result)
        return result

    def _reads(self, module: torch.fx.GraphModule) -> Graph:
        """Return a graph that reads what the new one calls and reads, which `module` must not have for itself."""
        plain = nn.Module()
        reads = Graph()
        for twin in self.result.nodes:
            if twin.op in ("call_module", "get_attr") and HELPER not in twin.meta:
                first = str(twin.target).partition(".")[0]
                if hasattr(module, first) and not hasattr(plain, first):
                    raise TargetError(
                        f"node '{twin.name}' refers to '{twin.target}', but '{first}' of a torch.fx.GraphModule is "
                        "something else; rename that attribute of the model"
                    )
                reads.get_attr(str(twin.target))
        return reads


def _class_name(module: GraphModule) -> str:
    # Python gives a class no name with a NUL character or half a surrogate pair in it.
    name = plain_text(module._get_name())
    return name if name.isprintable() else identifier_of(name)


def _share(source: GraphModule, reads: Graph, result: torch.fx.GraphModule) -> None:
    """Let `result` have what `reads` reads of `source`, and its mode."""
    # A GraphModule makes its own modules on the way to what it shares.
    shares = GraphModule(source, reads)
    first_names = {node.target.partition(".")[0] for node in reads.nodes}
    attributes: dict[str, Any] = vars(result)
    for name, value in vars(shares).items():
        if name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            attributes[name].update(value)
        elif name in first_names or name == "training":
            attributes[name] = value
