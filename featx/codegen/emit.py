"""Turn a graph into the source of its forward function."""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.amp import autocast_mode

from featx.codegen.identifiers import attribute, check_root, comment, keyword_argument, quoted
from featx.codegen.literals import function_name, literal
from featx.codegen.paths import ModulePaths
from featx.errors import ArgumentTypeError, ForeignNodeError, GraphError
from featx.ir.graph import Graph
from featx.ir.identifiers import is_plain, legal_target, parameter_of, plain_text
from featx.ir.names import Namespace, name_to_ask
from featx.ir.node import Node
from featx.ir.python_operators import AUGMENTED, INFIX, PREFIX
from featx.ir.runtime_checks import is_runtime_check

_TENSOR = re.compile(r"(?<![\w.])Tensor\b")
# The names that generated code knows without an import.
ALWAYS_KNOWN: dict[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "inf": float("inf"),
    "nan": float("nan"),
    "NoneType": type(None),
}


@dataclasses.dataclass
class PythonCode:
    """The source of a forward function and what it refers to.

    `globals` maps global names to objects. `tensors` maps attribute names of the module to tensors that stood
    literally in the graph. `lines` maps line numbers of `src`, from 1, to the names of the nodes they compute.
    """

    src: str
    globals: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    lines: dict[int, str]


def emit(
    graph: Graph,
    root_module: str = "self",
    *,
    verbose: bool = False,
    name_tensor: Callable[[torch.Tensor], str] | None = None,
) -> PythonCode:
    """Write the forward function that `graph` describes: one statement a node, values freed after their last use.

    A comment says by which name a node is asked for, where its variable does not show it.

    `name_tensor` says under which attribute of the module a tensor in the arguments is kept (by default
    `_tensor_constant0`, `_tensor_constant1`...). The graph is not changed. O(nodes + edges).

    Raises:
        ArgumentTypeError: an argument cannot be written as code; the message names the node.
        GraphError: an input or the module cannot have the name that it has.
    """
    return _Emitter(graph, root_module, verbose, name_tensor).emit()


class _Emitter:
    def __init__(
        self, graph: Graph, root: str, verbose: bool, name_tensor: Callable[[torch.Tensor], str] | None
    ) -> None:
        self._graph = graph
        self._root = check_root(root)
        self._verbose = verbose
        self._name_tensor = name_tensor or self._number_tensor
        self._names = Namespace()
        self._names.reserve(self._root)
        self._parameter_names: set[str] = set()
        self._reserve_parameters()
        self._grad_mode = self._names.create_name("grad_enabled")
        self._variables = {node: self._name_variable(node) for node in graph.nodes}
        self._globals: dict[str, Any] = {}
        self._global_names: dict[int, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensor_names: dict[int, str] = {}
        self._functions: dict[Callable[..., Any], str] = {}
        paths = [node.target for node in graph.nodes if node.op in ("call_module", "get_attr")]
        self._paths = ModulePaths(self._root, paths, self._names.create_name, self.name_of_builtin)
        self._parameters: list[str] = []
        self._is_in_signature = False
        self._return_annotation = ""
        self._body: list[str] = []
        self._lines: dict[int, str] = {}

    def emit(self) -> PythonCode:
        freed = _freed_after(self._graph)
        for node in self._graph.nodes:
            try:
                self._emit_node(node, freed.get(node, ()))
            except ArgumentTypeError as error:
                raise ArgumentTypeError(f"cannot write the code of node '{node.name}': {error}") from error
        body = self._body or ["pass\n"]
        start, end = self._modes()
        if end:
            body = [*start, "try:\n", *["    " + line for line in body], "finally:\n", *["    " + line for line in end]]
            self._lines = {line + len(start) + 1: name for line, name in self._lines.items()}
        if self._graph.code_transformer is not None:
            body = self._graph.code_transformer(body)
            self._lines = {}
        signature = ", ".join([self._root, *self._parameters])
        header = f"\n\n\ndef forward({signature}){self._return_annotation}:"
        indented = "\n".join(["    " + line for line in "".join(body).split("\n")])
        return PythonCode(f"{header}\n{indented}", {**ALWAYS_KNOWN, **self._globals}, self._tensors, self._lines)

    def _modes(self) -> tuple[list[str], list[str]]:
        """Return what to run before the body and after it, so that modes are restored whatever happens in it."""
        start: list[str] = []
        end: list[str] = []
        if any(node.target is torch._C._set_grad_enabled for node in self._graph.nodes):
            start.append(f"{self._grad_mode} = torch.is_grad_enabled()\n")
            end.append(f"torch._C._set_grad_enabled({self._grad_mode})\n")
        for node in self._graph.nodes:
            if node.target is autocast_mode._enter_autocast:
                # The variable is freed when the region is left.
                name = self._variables[node]
                start.append(f"{name} = None\n")
                end.append(f"if {name} is not None: torch.amp.autocast_mode._exit_autocast({name})\n")
        return start, end[::-1]  # an inner region is left before the one around it, whose state it found

    def _reserve_parameters(self) -> None:
        has_default = False
        stars = ""
        for node in self._graph.nodes:
            if node.op != "placeholder":
                continue
            name = parameter_of(node.target)
            earlier, stars = stars, max(stars, plain_text(node.target).removesuffix(name))
            if earlier == "**" or (earlier and node.target != name and stars == earlier):
                raise GraphError(f"input '{node.target}' must come before the input with * or **; move it to the front")
            if node.target != name and node.args:
                raise GraphError(f"input '{node.target}' takes the rest of the arguments and can have no default")
            if name == self._root or name in ("torch", "inf", "nan"):
                raise GraphError(f"an input cannot be named '{name}', which the generated code uses; rename it")
            if name in self._parameter_names or not is_plain(name):
                raise GraphError(f"{node.target!r} cannot name an input: it is taken, or not a name in Python")
            is_positional = node.target == name and not node.meta.get("keyword_only")
            if is_positional and has_default and not node.args:
                raise GraphError(f"input '{name}' has no default, but one before it has; move it to the front")
            has_default = has_default or (is_positional and bool(node.args))
            self._parameter_names.add(name)
            self._names.reserve(name)

    def _name_variable(self, node: Node) -> str:
        if node.op == "placeholder" and parameter_of(node.target) == node.name:
            return parameter_of(node.target)
        return self._names.create_name(node.name)

    # -- what literals ask -------------------------------------------------------------------------------------------

    def name_of_node(self, node: Node) -> str:
        variable = self._variables.get(node)
        if variable is None:
            raise ForeignNodeError(
                f"node '{node.name}' is an argument in a graph that it is not in, or was erased from"
            )
        return variable

    def name_of_builtin(self, name: str) -> str:
        if name in self._parameter_names or name == self._root:
            return self.name_of_global(f"builtins_{name}", getattr(builtins, name))
        return name

    def name_of_global(self, hint: str, value: object) -> str:
        name = self._global_names.get(id(value))
        if name is None:
            name = self._global_names[id(value)] = self._names.create_name(hint)
            self._globals[name] = value
        return name

    def name_of_tensor(self, tensor: torch.Tensor) -> str:
        if self._is_in_signature:
            return self.name_of_global("_default", tensor)
        name = self._name_tensor(tensor)
        self._tensors[name] = tensor
        return attribute(self._root, name, self.name_of_builtin)

    def _number_tensor(self, tensor: torch.Tensor) -> str:
        return self._tensor_names.setdefault(id(tensor), f"_tensor_constant{len(self._tensor_names)}")

    # -- statements --------------------------------------------------------------------------------------------------

    def _emit_node(self, node: Node, freed: list[Node] | tuple[()]) -> None:
        if self._verbose and node.stack_trace:
            self._body.append(f"{comment(node.stack_trace)}\n")
        if node.op == "placeholder":
            self._emit_placeholder(node)
            return
        if node.op == "output":
            if node.type is not None:
                self._return_annotation = f" -> {self._annotation(node.type)}"
            self._body.append(f"return {literal(node.args[0], self)}\n")
            return
        statement = self._statement(node)
        if not node.users and not _has_no_variable(node):
            freed = [*freed, node]
        if freed:
            statement += f";  {' = '.join([self._variables[value] for value in freed])} = None"
        asked = name_to_ask(node)
        if asked is not None:
            statement += f"  {comment(asked)}"
        self._body.append(statement + "\n")
        # The header takes four lines: three are blank.
        self._lines[len(self._body) + 4] = node.name

    def _emit_placeholder(self, node: Node) -> None:
        annotation = "" if node.type is None else f" : {self._annotation(node.type)}"
        self._is_in_signature = True
        default = f" = {literal(node.args[0], self)}" if node.args else ""
        self._is_in_signature = False
        name = parameter_of(node.target)
        is_keyword_only = name == node.target and node.meta.get("keyword_only")
        if is_keyword_only and not any(parameter.startswith("*") for parameter in self._parameters):
            self._parameters.append("*")
        self._parameters.append(f"{plain_text(node.target)}{annotation}{default}")
        if name != self._variables[node]:
            self._body.append(f"{self._variables[node]} = {name}\n")

    def _statement(self, node: Node) -> str:
        variable = self._variables[node]
        if node.type is not None:
            variable += f" : {self._annotation(node.type)}"
        if node.op == "call_function":
            if _is_item_write(node):
                owner, key, value = [literal(argument, self) for argument in node.args]
                return f"{owner}[{key}] = {value}"
            if _has_no_variable(node):
                return self._call_of_function(node)
            if node.target in AUGMENTED and len(node.args) == 2 and not node.kwargs:
                # As the model writes it, which TorchScript takes too.
                left, right = [literal(argument, self) for argument in node.args]
                return f"{variable} = {left};  {self._variables[node]} {AUGMENTED[node.target]} {right}"
            return f"{variable} = {self._call_of_function(node)}"
        if node.op == "call_method":
            name = legal_target(node.op, node.target)
            method = attribute(self._owner(node.args[0]), cast(str, name), self.name_of_builtin)
            return f"{variable} = {method}({self._arguments(node.args[1:], node.kwargs)})"
        expression = self._paths.expression(node.target, self._body)
        if node.op == "get_attr":
            return f"{variable} = {expression}"
        return f"{variable} = {expression}({self._arguments(node.args, node.kwargs)})"

    def _call_of_function(self, node: Node) -> str:
        function, args = node.target, node.args
        if not node.kwargs:
            if len(args) == 2 and function in INFIX:
                left = literal(args[0], self)
                if left.startswith("-"):
                    left = f"({left})"
                return f"{left} {INFIX[function]} {literal(args[1], self)}"
            if len(args) == 2 and function is operator.getitem:
                return f"{literal(args[0], self)}[{literal(args[1], self)}]"
            if len(args) == 2 and function is getattr and isinstance(args[1], str):
                return attribute(self._owner(args[0]), args[1], self.name_of_builtin)
            if len(args) == 1 and function in PREFIX:
                return f"{PREFIX[function]}{literal(args[0], self)}"
        name = self._functions.get(function)
        if name is None:
            name = self._functions[function] = function_name(function, self)
        return f"{name}({self._arguments(args, node.kwargs)})"

    def _owner(self, value: Any) -> str:
        text = literal(value, self)
        return text if isinstance(value, (Node, torch.Tensor)) else f"({text})"

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        variables = self._variables
        parts = [
            variables[value] if type(value) is Node and value in variables else literal(value, self) for value in args
        ]
        if kwargs:
            parts += [keyword_argument(key, literal(value, self)) for key, value in kwargs.items()]
        return ", ".join(parts)

    def _annotation(self, annotation: Any) -> str:
        if isinstance(annotation, type) and not hasattr(annotation, "__origin__"):
            return function_name(annotation, self)
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        # In a string TorchScript knows no `|`, and `Tensor` by its full name only.
        text = _TENSOR.sub("torch.Tensor", text)
        if text.endswith(" | None"):
            text = f"Optional[{text.removesuffix(' | None')}]"
        return quoted(text)


def _is_item_write(node: Node) -> bool:
    """Say whether `node` is `owner[key] = value` and can stand as that statement."""
    if node.target is not operator.setitem or node.users or node.kwargs or len(node.args) != 3:
        return False
    return isinstance(node.args[0], (Node, torch.Tensor))  # no statement writes an item of a number


def _has_no_variable(node: Node) -> bool:
    """Say whether the statement of `node` gives its value no name: a write of an item, or a check that featx added."""
    return _is_item_write(node) or (is_runtime_check(node.target) and not node.users and node.type is None)


def _freed_after(graph: Graph) -> dict[Node, list[Node]]:
    """Map each node to the values that nothing reads after it; inputs of the output are not freed."""
    seen: set[Node] = set()
    freed: dict[Node, list[Node]] = {}
    for user in reversed(graph.nodes):
        for source in user.all_input_nodes:
            if source not in seen:
                seen.add(source)
                freed.setdefault(user, []).append(source)
    return freed
