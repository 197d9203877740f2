"""Transformer: rebuild a graph by running it on proxies; a subclass says what becomes of each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from featx.interpret.interpreter import Interpreter
from featx.ir.arguments import Argument
from featx.ir.copying import ORIGIN
from featx.ir.graph import Graph
from featx.ir.modules import walk_modules
from featx.ir.node import Node, Target
from featx.module import GraphModule
from featx.tracing.nodes.proxy import Proxy
from featx.tracing.nodes.tracer_base import TracerBase
from featx.tracing.symbolic.constants import RealTensors
from featx.tracing.symbolic.tracer import Tracer


class Transformer(Interpreter):
    """Makes a new `GraphModule` of one by running its graph on proxies.

    Override `placeholder`, `get_attr`, `call_function`, `call_method` or `call_module`: each gets the target of a node
    and its arguments, proxies among them, and returns the proxy that takes its place. What it does with proxies is
    recorded in `new_graph`: torch functions, operators, calls of modules and `super().call_function(...)`. The
    methods here copy the node.

    A node that is copied keeps its name, its type and its `meta`. What else takes the place of a node keeps
    `meta["qualified_name"]`, so that its value is found under the same name. All that is made for a node keeps the meta
    that says where in the model it comes from.

    Args:
        module: what to transform; it is not changed.

    Raises:
        ArgumentTypeError: `module` has no featx graph.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self._has_run = False
        self._start()

    def _start(self) -> None:
        graph = self.graph
        self.new_graph = Graph(tracer_cls=graph.tracer_cls, tracer_extras=graph.tracer_extras)
        self.new_graph.code_transformer = graph.code_transformer
        self.tracer = _Retracer(self.module, self.new_graph)

    def transform(self) -> GraphModule:
        """Return the new module. It shares the submodules, parameters and buffers of the old one. O(nodes + edges).

        Raises:
            TraceError: code of a subclass asks a proxy for something that only a value has.
            TargetError: the new graph refers to something that the module does not have.
        """
        if self._has_run:
            self._start()
        self._has_run = True
        result = super().run()
        output = self.graph.root.prev
        if output.op == "output":
            self.tracer.begin(output)
            node = self.tracer.create_node("output", "output", (self.tracer.create_arg(result),), {})
            self.tracer.finish(output, node, self.env)
        module = GraphModule(self.module, self.new_graph, self.module._get_name())
        module.meta.update(getattr(self.module, "meta", {}))
        return module

    def run_node(self, n: Node) -> Any:
        """Return what takes the place of `n`, a proxy as a rule, and give the meta of `n` to what was made for it."""
        self.tracer.begin(n)
        result = super().run_node(n)
        self.tracer.finish(n, _node_of(result), self.env)
        return result

    # -- one method for each opcode ----------------------------------------------------------------------------------

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add an input; `args` holds its default, if there is one."""
        return self.tracer.create_proxy("placeholder", target, args, {})

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the read of the parameter, buffer or attribute at the path `target`."""
        return self.tracer.create_proxy("get_attr", target, (), {})

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record `target(*args, **kwargs)`."""
        return self.tracer.create_proxy("call_function", target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of the method named `target` of `args[0]`."""
        return self.tracer.create_proxy("call_method", target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of the submodule at the path `target`; to trace through it, call it instead."""
        return self.tracer.create_proxy("call_module", target, args, kwargs)


class _Retracer(Tracer):
    """Records in `graph` what is done with proxies, and with the tensors and modules of `root`."""

    def __init__(self, root: nn.Module, graph: Graph) -> None:
        super().__init__()
        self.root = root
        self.root_module_name = root._get_name()
        self.graph = graph
        self.submodule_paths = {module: path for path, module in walk_modules(root)}
        self._training = {module: module.training for module in self.submodule_paths}
        self._tensors = RealTensors(self, root)
        # A tensor that stands literally in the graph is among the buffers of a GraphModule too.
        self._literals = {id(getattr(root, name)) for name in getattr(root, "_literals", ())}
        # In whose place nodes are made, which of them has its name, and all of them.
        self._origin: Node | None = None
        self._copy: Node | None = None
        self._made: list[Node] = []
        # By name, the nodes that are no copies.
        self._others: dict[str, Node] = {}

    def begin(self, origin: Node) -> None:
        """Take what is made from now on for made in the place of `origin`."""
        self._origin, self._copy, self._made = origin, None, []

    def finish(self, origin: Node, result: Node | None, env: Mapping[Node, Any]) -> None:
        """Give what was made for `origin`, of which `result` takes its place, what of its meta holds for it.

        What a node has in its meta already stays. `env` has the proxies in the places of the inputs of `origin`.
        """
        for node in self._made:
            if node is not result:
                keys: Iterable[str] = ORIGIN
            elif node.op != origin.op or node.target != origin.target:
                keys = (*ORIGIN, "qualified_name")
            else:
                keys = origin.meta
                self._name_copy(node)
            meta = {key: origin.meta[key] for key in keys if key in origin.meta}
            if "effects" in meta and node.all_input_nodes != [_node_of(env[old]) for old in origin.all_input_nodes]:
                del meta["effects"]  # they count the inputs by position
            node.meta = {**meta, **node.meta}
        self._origin = None

    def _name_copy(self, node: Node) -> None:
        first = self._copy
        if first is not None and first is not node:
            first.name, node.name = node.name, first.name
            node.type = first.type if node.type is None else node.type
            self._others[first.name] = first

    def create_proxy(
        self,
        kind: str,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Callable[[Node], Proxy] | None = None,
    ) -> Any:
        """Record a call. Qualified names come from the graph that is transformed, so none is made up as in a trace."""
        return TracerBase.create_proxy(self, kind, target, args, kwargs, name, type_expr, proxy_factory_fn)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Answer that every module is one node."""
        return True

    def create_node(
        self,
        kind: str,
        target: Target,
        args: tuple[Argument, ...],
        kwargs: dict[str, Argument],
        name: str | None = None,
        type_expr: Any = None,
    ) -> Node:
        """Add a node. The first one in the place of another that does the same gets its name and type."""
        origin = self._origin
        if origin is None or self._copy is not None or kind != origin.op or target != origin.target:
            node = self.graph.create_node(kind, target, args, kwargs, name, type_expr)
            self._others[node.name] = node
        else:
            self._make_way(origin.name)
            type_expr = origin.type if type_expr is None else type_expr
            node = self._copy = self.graph.create_node(kind, target, args, kwargs, origin.name, type_expr)
        self._made.append(node)
        return node

    def _make_way(self, name: str) -> None:
        other = self._others.pop(name, None)
        if other is None:
            return
        if other.name == name:
            other.name = self.graph._names.create_name(name)
            self._others[other.name] = other
        self.graph._names.release(name)

    def create_other_arg(self, a: Any) -> Argument:
        """Leave a literal tensor of the graph as it is, and do with everything else what every tracer does."""
        return a if id(a) in self._literals else super().create_other_arg(a)


def _node_of(value: Any) -> Node | None:
    return value.node if issubclass(type(value), Proxy) else None
