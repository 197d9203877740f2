"""Turn graphs and graph modules of featx into those of torch.fx, and back.

What torch.fx's code cannot hold stands in helper nodes, which are marked in `node.meta` and go away on the way back.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast, overload

import torch
import torch.fx.graph
import torch.fx.node
from torch import nn
from torch.fx.graph import CodeGen

from featx.errors import ArgumentTypeError, FeatxError, ForeignNodeError, GraphError, TargetError
from featx.interop.generated import hidden_name, put_modes_back
from featx.interop.meta import Translation
from featx.interop.written import is_misread, is_written, last_readers
from featx.ir.graph import Graph
from featx.ir.names import name_of_target, resolve
from featx.ir.node import Node, collect_nodes
from featx.ir.verify import find_attribute, verify
from featx.module import GraphModule

# In node.meta: what a node that only torch.fx's code needs stands for.
_HELPER = "featx_helper"
# In node.meta["is_wrapped"], where torch.fx notes that a function stays one node when the code is traced again.
_WRAPPED_HERE = "by featx"


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
        conversion = _ToTorch(given, None)
        if given.root.prev.op == "output":
            conversion.check(conversion.result)
        return conversion.result
    if not isinstance(given, GraphModule):
        raise ArgumentTypeError(
            f"to_torch_fx takes a featx.GraphModule or featx.Graph, got {type(given).__name__}; trace a model first"
        )
    conversion = _ToTorch(given.graph if graph is None else graph, given)
    return conversion.module(given)


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
        module: what to convert.
        graph: convert this graph, on the submodules of `module`.

    Raises:
        ArgumentTypeError: torch.fx generates the code in a way of its own (`set_codegen`, `on_generate_code`).
        GraphError: the graph is malformed, or reads a `setitem` node.
        TargetError: the module lacks a target of the graph.
    """
    given = cast(object, module)
    if isinstance(given, torch.fx.Graph):
        return _from_graph(given, None)
    if not isinstance(given, torch.fx.GraphModule):
        raise ArgumentTypeError(
            f"from_torch_fx takes a torch.fx.GraphModule or torch.fx.Graph, got {type(given).__name__}; "
            "trace a model with featx.trace instead"
        )
    converted = _from_graph(given.graph if graph is None else graph, given)
    result = GraphModule(given, converted, type(given).__name__)
    result.meta.update(given.meta)
    return result


class _ToTorch:
    """One conversion to torch.fx: the new graph, and what of the old one is where in it."""

    def __init__(self, graph: Graph, module: GraphModule | None) -> None:
        verify(graph, module)
        if graph.code_transformer is not None:
            raise GraphError(
                "the graph edits its generated code (on_generate_code), which is not the code of torch.fx; "
                "convert it without that, and edit the code of the result"
            )
        self._module = module
        self.result = torch.fx.Graph()
        self._twins: dict[Node, torch.fx.Node] = {}
        self._names = {node.name for node in graph.nodes}
        # Helper nodes by the id of the literal, which the graph keeps alive; and what they read from the module.
        self._constants: dict[int, torch.fx.Node] = {}
        self._attributes: dict[str, Any] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._numbers = {"_tensor_constant": itertools.count(), "_constant": itertools.count()}
        self._last = last_readers(graph)
        for node in graph.nodes:
            try:
                self._twins[node] = self._convert(node)
            except ArgumentTypeError as error:
                raise ArgumentTypeError(f"torch.fx cannot hold node '{node.name}': {error}") from error
        self._copy_meta()
        self._choose_code(graph)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def _convert(self, node: Node) -> torch.fx.Node:
        target = node.target
        if node.name == "self" or (node.op == "placeholder" and target.lstrip("*") == "self"):
            raise GraphError(f"node '{node.name}' has the name by which torch.fx's code calls the module; rename it")
        if target is operator.setitem and node.users:
            raise _setitem_error(node)
        if node.op == "call_function":
            target = self._function(target)
        if node.op == "placeholder":
            for default in node.args:
                if not is_written(default, nested=False):
                    raise ArgumentTypeError(
                        f"its default {default!r} cannot be written in the code of torch.fx; make it None, a number or "
                        "a string, or an attribute of the module"
                    )
        args = tuple([self._argument(value) for value in node.args])
        if is_misread(node, self._last):
            alias = self._helper("alias", "call_function", operator.getitem, ((args[0],), 0), f"{node.name}_argument")
            args = (alias, *args[1:])
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
        return self._add(node.op, target, args, kwargs, node.name, node.type)

    def _add(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, kind: Any = None
    ) -> torch.fx.Node:
        twin = self.result.create_node(op, target, args, kwargs, name, kind)
        twin.name = name  # whatever torch.fx makes of it: its code finds free names anyway
        return twin

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, in a `Named` where torch.fx's code would call something else by its name."""
        known = self._functions.get(id(function))
        if known is None:
            known = self._functions[id(function)] = function if _has_name(function) else Named(function)
        return known

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _argument(self, value: Any, *, nested: bool = False) -> Any:
        """Return `value` with the nodes of torch.fx in it, and with helper nodes for what torch.fx cannot write."""
        kind = type(value)
        if kind is Node:
            return self._twins[value]
        if is_written(value, nested=nested):
            return value
        if isinstance(value, list):
            return [self._argument(item, nested=nested) for item in cast(list[Any], value)]
        if kind is tuple:
            return tuple([self._argument(item, nested=nested) for item in value])
        if kind is slice:
            return slice(*[self._argument(item, nested=nested) for item in (value.start, value.stop, value.step)])
        if isinstance(value, dict):
            return self._dict(cast(dict[Any, Any], value))
        return self._tuple(cast(tuple[Any, ...], value), nested) if isinstance(value, tuple) else self._constant(value)

    def _tuple(self, value: tuple[Any, ...], nested: bool) -> Any:
        # Of a class of its own. torch.fx keeps named tuples, outside of dicts and of each other.
        kind: Any = type(value)
        is_named = hasattr(value, "_fields")
        if is_named and not nested and self._function(kind) is kind:
            return kind(*[self._argument(item, nested=True) for item in value])
        found: dict[Node, None] = {}
        collect_nodes(value, found)
        if not found:
            return self._constant(value)
        items = tuple([self._argument(item) for item in value])
        return self._helper("built", "call_function", self._function(kind), items if is_named else (items,), "tuple_1")

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        for key in value:
            if not is_written(key, nested=True):
                raise ArgumentTypeError(
                    f"a dict has the key {key!r}, which torch.fx's code does not write as what it is; use a string"
                )
        return {key: self._argument(item, nested=True) for key, item in value.items()}

    def _constant(self, value: Any) -> torch.fx.Node:
        known = self._constants.get(id(value))
        if known is not None:
            return known
        if isinstance(value, nn.Module) or self._module is None:
            next_step = "register it in the module and read it with graph.get_attr(path)"
            if not isinstance(value, nn.Module):
                next_step = "convert the GraphModule, which can keep it as an attribute"
            raise ArgumentTypeError(f"an argument is a {type(value).__name__}, which no code can write; {next_step}")
        name = self._module.name_of_literal(value) if isinstance(value, torch.Tensor) else None
        if name is not None:
            value_now = getattr(self._module, name)  # which may have followed the module to a device
        else:
            name, value_now = self._free_attribute(value, self._module), value
        self._attributes[name] = value_now
        helper = self._constants[id(value)] = self._helper("constant", "get_attr", name, (), name)
        return helper

    def _free_attribute(self, value: Any, module: GraphModule) -> str:
        stem = "_tensor_constant" if isinstance(value, torch.Tensor) else "_constant"
        numbered = (f"{stem}{number}" for number in self._numbers[stem])
        return next(name for name in numbered if name not in self._attributes and not hasattr(module, name))

    def _helper(self, kind: str, op: str, target: Any, args: tuple[Any, ...], stem: str) -> torch.fx.Node:
        helper = self._add(op, target, args, {}, self._free_name(stem))
        helper.meta[_HELPER] = kind
        return helper

    def _free_name(self, stem: str) -> str:
        name = stem
        for number in itertools.count(1):
            if name not in self._names:
                break
            name = f"{stem}_{number}"
        self._names.add(name)
        return name

    # -- what is around the nodes --------------------------------------------------------------------------------------

    def _copy_meta(self) -> None:
        translated = Translation(self._twins, Node)
        for node, twin in self._twins.items():
            twin.meta = translated.meta(node.meta)
            target = twin.target
            if isinstance(target, (FunctionType, Named)) and target.__module__.startswith("featx."):
                # Or torch.fx would go into the function when it traces the code again, as it does to unpickle it.
                twin.meta.setdefault("is_wrapped", _WRAPPED_HERE)

    def _choose_code(self, graph: Graph) -> None:
        inputs = [node for node in graph.nodes if node.op == "placeholder" and node.meta.get("keyword_only")]
        switches = (torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast)
        switches_modes = any(node.target in switches for node in graph.nodes if node.op == "call_function")
        if inputs or switches_modes:
            self.result.set_codegen(_Code(frozenset([node.target for node in inputs])))
        if switches_modes:
            self.result.on_generate_code(lambda _: put_modes_back)

    def module(self, source: GraphModule) -> torch.fx.GraphModule:
        """Return a module that runs the new graph on what the old one has in `source`."""
        result = torch.fx.GraphModule(nn.Module(), torch.fx.Graph(), source._get_name())
        plain = nn.Module()
        reads = Graph()
        for twin in self.result.nodes:
            if twin.op in ("call_module", "get_attr") and _HELPER not in twin.meta:
                first = str(twin.target).partition(".")[0]
                if hasattr(result, first) and not hasattr(plain, first):
                    raise TargetError(
                        f"node '{twin.name}' refers to '{twin.target}', but '{first}' of a torch.fx.GraphModule is "
                        "something else; rename that attribute of the model"
                    )
                reads.get_attr(str(twin.target))
        # A GraphModule makes its own modules on the way to what it shares.
        shares = GraphModule(source, reads)
        first_names = {node.target.partition(".")[0] for node in reads.nodes}
        for name, value in vars(shares).items():
            if name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                vars(result)[name].update(value)
            elif name in first_names or name == "training":
                vars(result)[name] = value
        for name, value in self._attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                result.register_buffer(name, value, persistent=False)
            else:
                setattr(result, name, value)
        result.meta.update(source.meta)
        self.check(result)
        return result

    # -- code ----------------------------------------------------------------------------------------------------------

    def check(self, owner: torch.fx.GraphModule | torch.fx.Graph) -> None:
        """Generate the code for `owner`, and raise where it is not what the graph says."""
        try:
            if isinstance(owner, torch.fx.GraphModule):
                owner.graph = self.result
                source = owner.code
            else:
                source = owner.python_code("self").src
                compile(source, "<torch.fx>", "exec")
        except Exception as error:  # whatever comes of reprs, names and annotations
            raise self._explained(error) from error
        names = {node.target.lstrip("*"): node.name for node in self.result.find_nodes(op="placeholder")}
        hidden = hidden_name(source, names)
        if hidden is not None:
            raise GraphError(
                f"input '{hidden}' (node '{names[hidden]}') hides what torch.fx's code calls by that name; "
                "rename the input: node.target"
            )

    def _explained(self, error: Exception) -> FeatxError:
        for twin in self._twins.values():
            alone = torch.fx.Graph()
            inputs = {source: alone.placeholder(f"input_{source.name}") for source in twin.all_input_nodes}
            try:
                copy = alone.node_copy(twin, inputs.__getitem__)
                if copy.op != "output":
                    alone.output(None)  # of inputs alone torch.fx makes no code that Python takes
                compile(alone.python_code("self").src, "<torch.fx>", "exec")
            except Exception as reason:
                return ArgumentTypeError(
                    f"torch.fx cannot write the code of node '{twin.name}' ({twin.op} {twin.target}): {reason}; "
                    "change its target, its arguments or its type"
                )
        return GraphError(f"torch.fx cannot write the code of this graph: {error}; run it with featx, or change it")


class Named:
    """A callable in a graph of torch.fx that has no name of its own by which torch.fx's code could call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name_of_target(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def _has_name(function: Callable[..., Any]) -> bool:
    try:
        name = torch.fx.node._get_qualified_name(function)
    except (AttributeError, RuntimeError):
        return False
    return not torch.fx.graph._is_from_torch(function) or resolve(name) is function


class _Code(CodeGen):
    """torch.fx's code with keyword-only inputs."""

    def __init__(self, keyword_only: frozenset[str]) -> None:
        super().__init__()
        self._keyword_only = keyword_only

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        for position, variable in enumerate(free_vars):
            if variable.startswith("*"):
                break
            if re.split(r"\W", variable, maxsplit=1)[0] in self._keyword_only:
                free_vars.insert(position, "*")
                break
        return super().gen_fn_def(free_vars, maybe_return_annotation, **options)


def _from_graph(graph: torch.fx.Graph, module: torch.fx.GraphModule | None) -> Graph:
    code = graph._codegen
    if type(code) not in (CodeGen, _Code) or code._body_transformer not in (None, put_modes_back):
        raise ArgumentTypeError(
            f"the graph has code of its own ({type(code).__name__} or on_generate_code), which takes or returns "
            "something else than its nodes say; graph.set_codegen(torch.fx.graph.CodeGen()) takes that away"
        )
    result = Graph()
    values: dict[torch.fx.Node, Any] = {}

    def value_of(node: torch.fx.Node) -> Any:
        if node not in values:
            raise ForeignNodeError(f"'{node.name}' is read before it is computed, or belongs to another graph")
        return values[node]

    twins: dict[torch.fx.Node, Node] = {}
    for node in graph.nodes:
        if node.target is operator.setitem and node.users:
            raise _setitem_error(node)
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
        if twin.meta.get("is_wrapped") == _WRAPPED_HERE:
            del twin.meta["is_wrapped"]
        twin.meta.pop(_HELPER, None)
    return result


def _helped_value(
    node: torch.fx.Node, module: torch.fx.GraphModule | None, value_of: Callable[[torch.fx.Node], Any]
) -> tuple[Any] | None:
    """Return what a helper node stands for, unless somebody has made another node of it."""
    shape: Any = (node.meta.get(_HELPER), node.op, node.target, node.args)
    match shape:
        case "constant", "get_attr", str(path), _ if module is not None:
            return (find_attribute(module, path, cast(Any, node)),)
        case "alias", "call_function", operator.getitem, ((value,), 0):
            return (torch.fx.map_arg(value, value_of),)
        case "built", "call_function", kind, args if isinstance(kind, (type, Named)):
            return (kind(*torch.fx.map_arg(args, value_of)),)
        case _:
            return None


def _setitem_error(node: Node | torch.fx.Node) -> GraphError:
    readers = ", ".join(f"'{user.name}'" for user in node.users)
    return GraphError(
        f"node '{node.name}' writes an item and is read by {readers}: its value is None, but in torch.fx's code it is "
        "what was written into; let them read one of the two"
    )
