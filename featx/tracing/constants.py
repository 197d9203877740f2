"""Follow tensors that are real during a symbolic trace: the model's own, what is computed from them, and literals.

A model may compute with its buffers alone, where no proxy is involved. Such a call runs, so that shapes and types are
known, and is remembered; if its result meets a traced value, the call becomes part of the graph. So the graph reads
the buffers when it runs, and not the values that they had during the trace.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from featx.errors import ControlFlowError
from featx.ir.effects import operator_draws, operator_writes
from featx.ir.graph import Graph
from featx.ir.node import Argument, Node, map_aggregate
from featx.tracing.proxy import refusal
from featx.tracing.scope import walk_modules
from featx.tree import tree_leaves

if TYPE_CHECKING:
    from featx.tracing.symbolic import Tracer

_READS_VALUES = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__contains__",
        "__array__",
        "equal",
        "is_nonzero",
    ]
)


@dataclasses.dataclass
class _Call:
    """A call that ran on the model's own tensors; `node` is set once the graph contains it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    is_single: bool
    node: Node | None = None


class ModelTensors:
    """The real tensors of one trace of `root`."""

    def __init__(self, tracer: Tracer, root: nn.Module) -> None:
        self._tracer = tracer
        self._root = root
        # Made at the first question: a model of leaf modules alone never asks.
        self._known_paths: dict[int, str] | None = None
        self._calls: list[_Call] = []
        # Results of calls, by identity; the calls keep them alive, so that ids are not reused.
        self._derived: dict[int, tuple[_Call, int]] = {}
        self._has_literals = False

    def path_of(self, tensor: object) -> str | None:
        """Return the dotted path of a tensor that the model owns, else None."""
        return self._paths.get(id(tensor))

    @property
    def _paths(self) -> dict[int, str]:
        paths = self._known_paths
        if paths is None:
            paths = self._known_paths = {}
            for prefix, module in walk_modules(self._root):
                for name, tensor in _tensors_of(module):
                    paths.setdefault(id(tensor), f"{prefix}.{name}" if prefix else name)
        return paths

    def argument(self, tensor: torch.Tensor) -> Argument:
        """Return what stands for `tensor` in the graph: a read of the model, nodes that compute it, or itself."""
        path = self._paths.get(id(tensor))
        if path is not None:
            return self._tracer.create_node("get_attr", path, (), {})
        if id(tensor) in self._derived:
            return self._materialize(*self._derived[id(tensor)])
        if isinstance(tensor, nn.Parameter):
            raise refusal(
                self._tracer,
                ControlFlowError,
                f"a parameter of shape {tuple(tensor.shape)} that the model does not own is used",
                "register it as an attribute of the model",
            )
        self._has_literals = True
        return tensor

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a torch call without traced arguments: run it, or record it where running it would be wrong.

        Random draws are recorded, because the trace must not fix one draw, and so are writes into the model's
        tensors, because the trace must not change the model.

        Raises:
            ControlFlowError: the model asks for the values of its own tensors, on which a graph cannot depend.
        """
        name = function.__name__
        is_own = any(id(leaf) in self._paths or id(leaf) in self._derived for leaf in tree_leaves((args, kwargs)))
        if not is_own:
            if operator_draws(name) and not kwargs.get("generator"):
                return self._tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)
        if name in _READS_VALUES:
            what = f"the values of a parameter or buffer decide what runs ({name})"
            raise refusal(self._tracer, ControlFlowError, what)
        if operator_writes(name) or kwargs.get("out") is not None:
            for earlier in self._calls:
                self._node_of(earlier)
            return self._tracer.proxy(self._record(function, args, kwargs))
        result = function(*args, **kwargs)
        self._remember(function, args, kwargs, result)
        return result

    def finish(self, graph: Graph) -> None:
        """Give each run of the graph its own copy of the literal tensors that the graph writes into."""
        if not self._has_literals:
            return
        for node in list(graph.nodes):
            target = node.args[0] if node.args else None
            if isinstance(target, torch.Tensor) and _writes_first_argument(node):
                _privatize(graph, target)

    def _remember(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        is_single = isinstance(result, torch.Tensor)
        results = [result] if is_single else (list(result) if isinstance(result, (tuple, list)) else [])
        tensors = [(index, item) for index, item in enumerate(results) if isinstance(item, torch.Tensor)]
        if tensors:
            call = _Call(function, args, kwargs, results, is_single)
            self._calls.append(call)
            for index, item in tensors:
                if id(item) not in self._paths:
                    self._derived.setdefault(id(item), (call, index))

    def _materialize(self, call: _Call, index: int) -> Node:
        node = self._node_of(call)
        if call.is_single:
            return node
        return self._tracer.create_node("call_function", operator.getitem, (node, index), {})

    def _node_of(self, call: _Call) -> Node:
        if call.node is None:
            call.node = self._record(call.function, call.args, call.kwargs)
        return call.node

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        # Not through create_proxy: torchvision's names know nothing of these nodes.
        create_arg, name = self._tracer.create_arg, function.__name__
        arguments, keywords = create_arg(args), create_arg(kwargs)
        if name == "__get__":
            owner: Any = function
            return self._tracer.create_node("call_function", getattr, (arguments[0], owner.__self__.__name__), {})
        if getattr(torch.Tensor, name, None) is function:
            return self._tracer.create_node("call_method", name, arguments, keywords)
        return self._tracer.create_node("call_function", function, arguments, keywords)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None:
            yield name, value
    for name, value in module.__dict__.items():
        if type(value) is torch.Tensor:
            yield name, value


def _writes_first_argument(node: Node) -> bool:
    if node.op == "call_method":
        return operator_writes(node.target)
    return node.op == "call_function" and operator_writes(node.target.__name__)


def _privatize(graph: Graph, tensor: torch.Tensor) -> None:
    def uses(node: Node) -> bool:
        return any(leaf is tensor for leaf in tree_leaves((node.args, node.kwargs)))

    users = [node for node in graph.nodes if uses(node)]
    with graph.inserting_before(users[0]):
        copy = graph.call_method("clone", (tensor,))
    for user in users:
        user.args = map_aggregate(user.args, lambda leaf: copy if leaf is tensor else leaf)
        user.kwargs = map_aggregate(user.kwargs, lambda leaf: copy if leaf is tensor else leaf)
