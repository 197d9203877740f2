"""GraphModule: a graph and the modules it calls, as an ordinary `nn.Module`."""

from __future__ import annotations

import copy
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, cast

import torch
from torch import nn

from featx.codegen.bound import InstanceForward, leave_to_callees
from featx.codegen.emit import PythonCode, emit
from featx.codegen.load import load_function
from featx.containers import twins_of_containers
from featx.errors import ArgumentTypeError, GraphError, RootError, TargetError
from featx.ir.apart import later_of, returned_of
from featx.ir.graph import Graph
from featx.ir.names import Namespace
from featx.ir.node import Node
from featx.ir.paths import parents_of
from featx.ir.verify import find_attribute, verify_targets
from featx.shared_attributes import install, share
from featx.tracing.checks.checked_trace import trace_checked
from featx.tracing.example.tracer import ExampleTracer
from featx.tracing.guards.guards import require_mode
from featx.tracing.guards.scriptable import require_scriptable
from featx.tree import clone_tensors, tree_leaves


class GraphModule(nn.Module):
    """Runs a graph on the modules and parameters of `root`, which are shared and not copied.

    The forward function is generated from the graph and is state of the instance. When the graph was edited since, it
    is generated anew before it runs, so edits never need `recompile()`; calling it moves that cost.

    Args:
        root: the module that has the graph's targets, or a dict from target paths to modules, parameters and tensors.
        graph: what to run; it is owned, not copied.
        class_name: the name that `repr` prints.

    Raises:
        TargetError: `root` lacks a target of the graph.
        ArgumentTypeError: `root` or `graph` has the wrong type.
    """

    # What TorchScript leaves alone: it takes the generated function, the submodules and the tensors.
    __jit_unused_properties__: ClassVar[list[str]] = ["forward", "graph", "code", "_jit_identity"]
    __constants__: ClassVar[list[str]] = ["_jit_identity"]
    __jit_ignored_attributes__: ClassVar[list[str]] = [
        "_graph", "_bound", "_code", "_class_name", "_compiled_edits", "_literals", "_literal_names", "meta"
    ]  # fmt: skip
    _graph: Graph
    _bound: MethodType
    _code: PythonCode
    _class_name: str
    _compiled_edits: int
    _literals: dict[str, torch.Tensor]
    _literal_names: dict[int, str]
    meta: dict[str, Any]

    def __init__(self, root: nn.Module | dict[str, Any], graph: Graph, class_name: str = "GraphModule") -> None:
        super().__init__()
        if not isinstance(cast(object, graph), Graph):
            raise ArgumentTypeError(f"graph must be a featx Graph, got {type(graph).__name__}")
        state = self.__dict__
        state["_class_name"] = class_name
        # Tensors that stand literally in the graph, by the name of the attribute that keeps them, and back.
        state["_literals"] = {}
        state["_literal_names"] = {}
        state["meta"] = {}
        self._copy_targets(root, [graph])
        self._compile(graph)

    def _copy_targets(self, root: nn.Module | dict[str, Any], graphs: Iterable[Graph]) -> None:
        if isinstance(root, nn.Module):
            self.training = root.training
        elif not isinstance(cast(object, root), dict):
            raise RootError(
                f"root must be an nn.Module or a dict from target paths to modules and tensors, "
                f"got {type(root).__name__}"
            )
        kind = type(self)
        own_state = _names_of_state(kind)
        for graph in graphs:
            for node in graph.nodes:
                if node.op in ("call_module", "get_attr"):
                    _check_name(node, kind, own_state)
                    if isinstance(root, nn.Module):
                        find_attribute(root, node.target, node)
                        share(root, self, node.target)
                    elif node.target in root:
                        install(self, node.target, root[node.target])
                    else:
                        raise TargetError(
                            f"node '{node.name}' refers to '{node.target}', which is not a key of the root dict"
                        )
            verify_targets(graph, self)

    # -- running -----------------------------------------------------------------------------------------------------

    @InstanceForward
    def forward(self) -> MethodType:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The generated function, bound to this module."""
        if self._graph.edits != self._compiled_edits:
            self._follow_edits(torch.compiler.is_dynamo_compiling())
        return self._bound

    leave_to_callees(cast("property", forward).fget)

    @forward.setter
    def forward(self, function: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        # For those who put their own function over an instance's, as nn.Module allows; the next edit undoes it.
        self.__dict__["_bound"] = function

    def _follow_edits(self, is_dynamo_tracing: bool) -> None:
        edits = self._compiled_edits
        try:
            self.recompile()
        except AttributeError as error:
            # From a property it would read as "GraphModule has no attribute 'forward'".
            raise GraphError(str(error)) from error
        if is_dynamo_tracing:
            # Dynamo has read this number and guards that it stays; the next eager call brings it up to date.
            self.__dict__["_compiled_edits"] = edits

    # Dynamo cannot trace a code generator; it calls a function with this mark while it traces. It is what
    # `torch.compiler.assume_constant_result` sets, which would load all of Dynamo when featx is imported.
    _follow_edits._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def recompile(self) -> PythonCode:
        """Generate the forward function from the graph as it is now, and return its source. O(nodes + edges).

        Raises:
            TargetError: the graph refers to a module or attribute that this module lacks.
            ArgumentTypeError: an argument in the graph cannot be written as code.
        """
        return self._replace_code(self._graph)

    def _replace_code(self, graph: Graph) -> PythonCode:
        """Compile a graph in place of what runs now, and drop the tensors that stood in that and stand in no graph."""
        before = self._code.tensors if "_code" in self.__dict__ else {}
        code = self._compile(graph)
        dropped = {name: tensor for name, tensor in before.items() if name not in code.tensors}
        others = [each for each in self._graphs_in_use() if each is not graph] if dropped else []
        used = {id(leaf) for each in others for node in each.nodes for leaf in tree_leaves((node.args, node.kwargs))}
        for name, tensor in dropped.items():
            if id(tensor) not in used:
                del self._literals[name], self._literal_names[id(tensor)]
                delattr(self, name)
        return code

    def _graphs_in_use(self) -> list[Graph]:
        return [value for value in self.__dict__.values() if isinstance(value, Graph)]

    def _compile(self, graph: Graph) -> PythonCode:
        verify_targets(graph, self)
        code = self._emit(graph)
        # At once and not at the first call, where Dynamo would have to trace it.
        function = load_function(code.src, code.globals)
        state = self.__dict__
        state["_graph"] = graph
        state["_code"] = code
        state["_bound"] = MethodType(function, self)
        state["_compiled_edits"] = graph.edits
        graph.owning_module = self
        return code

    def _emit(self, graph: Graph) -> PythonCode:
        """Return the code of a graph, and keep the tensors that stand in it under the names that it has for them."""
        code = emit(graph, "self", name_tensor=self._name_literal)
        for name, tensor in code.tensors.items():
            self._keep_literal(name, tensor)
        return code

    def name_of_literal(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the attribute that keeps a tensor which stands in the graph, if there is one by now.

        The attribute follows the module to a device; the tensor in the graph does not.
        """
        return self._literal_names.get(id(tensor))

    def _name_literal(self, tensor: torch.Tensor) -> str:
        names = self._literal_names
        name = names.get(id(tensor))
        if name is None:
            number = len(names)
            while hasattr(self, name := f"_tensor_constant{number}"):
                number += 1
            names[id(tensor)] = name
            self._literals[name] = tensor
        return name

    def _keep_literal(self, name: str, tensor: torch.Tensor) -> None:
        # A buffer follows .to(device); it is not a weight, so it stays out of the state dict.
        if name not in self._buffers and name not in self._parameters:
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GraphModule:
        # Tensors that stand in the graph follow the weights to a device. Their dtype is part of the computation.
        super()._apply(fn, recurse)
        for name, tensor in self._literals.items():
            buffer = self._buffers.get(name)
            if buffer is not None and buffer.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(buffer.device)
        return self

    def __prepare_scriptable__(self) -> GraphModule:
        """Return this module, as `torch.jit.script` asks for; it is what is compiled.

        Raises:
            ScriptError: the graph holds something that TorchScript is known not to express.
        """
        require_scriptable(self.graph)
        return self

    @property
    def _jit_identity(self) -> str:
        # TorchScript gives two modules of one class the same code unless a constant of theirs differs.
        return uuid.uuid4().hex

    # -- graph and code ----------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph that runs; assign another one to run that instead."""
        return self._graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        if not isinstance(cast(object, graph), Graph):
            raise ArgumentTypeError(f"graph must be a featx Graph, got {type(graph).__name__}")
        self._replace_code(graph)

    @property
    def code(self) -> str:
        """The source of the forward function, for the graph as it is now."""
        if self._graph.edits != self._compiled_edits:
            self.recompile()
        return self._code.src

    def print_readable(self, print_output: bool = True) -> str:
        """Return, and unless told otherwise print, the code of this module and of the graph modules inside it."""
        parts = [f"class {Namespace().create_name(self._get_name())}(torch.nn.Module):{_indent(self.code)}"]
        for child in self.children():
            if isinstance(child, GraphModule):
                parts.append(_indent("\n" + child.print_readable(print_output=False)))
        text = "\n".join(parts)
        if print_output:
            print(text)  # noqa: T201 - printing is what it is for
        return text

    def to_folder(
        self,
        folder: str | Path,
        module_name: str = "FxModule",
        *,
        example_inputs: Any = None,
        pickled: bool | None = None,
    ) -> None:
        """Write this module to `folder` as a package: `from folder import <module_name>` gives a class that makes it.

        The package is one readable Python file that imports torch and nothing else, and a safetensors file beside it
        (which needs the package safetensors to be written). Modules of other libraries are followed to those of
        torch.nn that they call; for that the module is traced once more, and the code holds for inputs like those.

        Args:
            folder: is made if it is not there.
            module_name: of the class.
            example_inputs: inputs to follow through this module, a tensor or a tuple; by default those from which an
                extractor was made, with other values.
            pickled: write the code as it is, which imports featx and what the classes of the modules come from, with
                the modules in a file that is loaded with pickle. By default only where the code cannot stand alone,
                with a warning that says why; with False that raises.

        Raises:
            ArgumentTypeError: with `pickled=False`, the code needs something else than torch; else it refers to an
                object that Python cannot import by name. The message names it.
            MissingExtraError: safetensors is not installed.
        """
        from featx.codegen.standalone import what_needs_more, write_standalone

        modules = {} if pickled else self._standalone_modules(example_inputs)
        reasons = [why for each in modules.values() if (why := what_needs_more(each, each.graph)) is not None]
        reasons += self._reasons_to_pickle() if modules else []
        if pickled is None and reasons:
            warnings.warn(
                f"the code in '{folder}' imports featx and other libraries, and unpickles modules: {reasons[0]}. Give "
                "example_inputs, so that modules are followed to those of torch, or pickled=True, if this is meant.",
                stacklevel=2,
            )
        if pickled is False or (modules and not reasons):
            if reasons:
                raise ArgumentTypeError(
                    f"the code cannot stand alone: {reasons[0]}. Give example_inputs, so that modules are followed, or "
                    "pickled=True for code that imports featx and what the modules come from"
                )
            root = _joined(list(modules.values()), is_training=self.training)
            codes = {mode: root._emit(module.graph) for mode, module in modules.items()}
            graphs = {mode: module.graph for mode, module in modules.items()}
            write_standalone(root, codes, graphs, Path(folder), module_name, self._about())
        else:
            from featx.codegen.package import write_package

            write_package(self, self._graph, self.recompile(), Path(folder), module_name)

    def _standalone_modules(self, example_inputs: Any) -> dict[bool, GraphModule]:
        """Return modules, by mode, whose graphs call torch alone, as far as that is possible."""
        from featx.codegen.standalone import is_standalone

        if is_standalone(self, self._graph) or example_inputs is None:
            return {self.training: self}
        args = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        module = opened(self, self.training, tuple(args), {})
        require_mode(module.graph, self.training, "in which it was written; write it again in the other one")
        return {self.training: module}

    def _reasons_to_pickle(self) -> list[str]:
        """Say why code that stands alone would not do what this module does now; there is nothing for one graph."""
        return []

    def _about(self) -> str:
        return f"It computes what a {self._get_name()} does."

    # -- submodules --------------------------------------------------------------------------------------------------

    def add_submodule(self, target: str, m: nn.Module) -> bool:
        """Install `m` at a dotted path, with empty modules on the way; False where the path is taken by a tensor."""
        *parents, name = target.split(".")
        owner: nn.Module = self
        for part in parents:
            child = getattr(owner, part, None)
            if child is None:
                child = nn.Module()
                owner.add_module(part, child)
            if not isinstance(child, nn.Module):
                return False
            owner = child
        if hasattr(owner, name) and name not in owner._modules:
            return False
        owner.add_module(name, m)
        return True

    def delete_submodule(self, target: str) -> bool:
        """Remove the submodule at a dotted path; False where there is none."""
        parent, _, name = target.rpartition(".")
        try:
            owner = self.get_submodule(parent)
            self.get_submodule(target)
        except AttributeError:
            return False
        delattr(owner, name)
        return True

    def delete_all_unused_submodules(self) -> None:
        """Remove every submodule that the graph neither calls nor reads from, nor needs on the way to one it does."""
        called = {node.target for node in self._graph.nodes if node.op == "call_module"}
        targets = {node.target for node in self._graph.nodes if node.op in ("call_module", "get_attr")}
        on_the_way = targets.union(*map(parents_of, targets))
        for name, _ in list(self.named_modules()):
            if name and name not in on_the_way and called.isdisjoint(parents_of(name)):
                self.delete_submodule(name)

    # -- copies and text ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # The function is generated again; everything else is plain state.
        state = self.__dict__.copy()
        for name in ("_bound", "_code", "_compiled_edits", "_compiled_call_impl", "_literal_names"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_literal_names"] = {id(tensor): name for name, tensor in self._literals.items()}
        for value in self.__dict__.values():
            if isinstance(value, Graph):
                value.owning_module = self
        self.recompile()

    def __copy__(self) -> GraphModule:
        duplicate = type(self).__new__(type(self))
        state = self.__getstate__()
        # The copy shares weights, and so the tensors that stand literally in the graph; what registers them is its own.
        shared: dict[int, Any] = {id(tensor): tensor for tensor in self._literals.values()}
        for name, value in state.items():
            if isinstance(value, Graph):
                state[name] = copy.deepcopy(value, shared)
            elif isinstance(value, (dict, set)):
                state[name] = value.copy()
        state["_modules"] = twins_of_containers(self)
        duplicate.__setstate__(state)
        return duplicate

    def _get_name(self) -> str:
        return self._class_name

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.code}"

    def _heading(self) -> str:
        return f"{self._class_name}, {len(self.graph.nodes)} nodes"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: modules and code folded."""
        folded = (
            f"<details><summary>{what}</summary><pre>{escape(text)}</pre></details>"
            for what, text in (("modules", nn.Module.__repr__(self)), ("code", self.code))
        )
        return f"<pre>{escape(self._heading())}</pre>{''.join(folded)}"


def _names_of_state(kind: type[GraphModule]) -> set[str]:
    names = {name for base in kind.__mro__ if issubclass(base, GraphModule) for name in base.__annotations__}
    return names | (nn.Module.__annotations__.keys() - {"training"})


def _check_name(node: Node, kind: type[GraphModule], own_state: set[str]) -> None:
    parts = node.target.split(".")
    first = parts[0]
    if not all(parts):
        raise TargetError(
            f"node '{node.name}' refers to {node.target!r}, in which a name is empty; "
            "rename that attribute of the model"
        )
    is_taken = hasattr(kind, first) and (first.startswith("__") or not hasattr(nn.Module, first))
    if is_taken or first in own_state:
        raise TargetError(
            f"node '{node.name}' refers to '{node.target}', but '{first}' of a GraphModule is something else; "
            f"rename that attribute of the model"
        )


def opened(root: nn.Module, training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GraphModule:
    """Trace a module in a mode, through all modules that a constructor of torch.nn does not make, and return it.

    Raises:
        TraceError: something cannot be followed; the message says where and what to do.
    """
    from featx.codegen.constructors import constructor_of

    leaves = {path for path, module in root.named_modules(remove_duplicate=False) if constructor_of(module) is not None}
    tracer = ExampleTracer(
        lambda module, path: path in leaves,
        autowrap_functions=(clone_tensors, later_of, returned_of),  # of generated code
        training=training,
        follows_wrapped=True,
    )
    trace, _ = trace_checked(tracer, root, args, kwargs)
    return GraphModule(root, trace.graph, type(root).__name__)


def _joined(modules: list[GraphModule], *, is_training: bool) -> GraphModule:
    """Return a module with the parts of several."""
    root = copy.copy(modules[0])
    for other in modules[1:]:
        root._copy_targets(other, [other.graph])
    root.training = is_training
    return root


def check_graph_module(gm: object) -> GraphModule:
    """Return `gm` if it is a graph module.

    Raises:
        ArgumentTypeError: it is not.
    """
    if isinstance(gm, GraphModule):
        return gm
    if is_of_torch_fx(gm):
        hint = "featx.from_torch_fx makes one of a module of torch.fx"
    else:
        hint = "trace the module first: featx.trace(model, example_input)"
    raise ArgumentTypeError(f"gm must be a featx GraphModule, got {type(gm).__name__}; {hint}")


def is_of_torch_fx(value: object) -> bool:
    """Say whether a module or a graph is one of torch.fx."""
    return type(value).__module__.startswith("torch.fx")


def _indent(text: str) -> str:
    return "\n".join("    " + line if line.strip() else line for line in text.split("\n"))
