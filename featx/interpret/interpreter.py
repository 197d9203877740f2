"""Interpreter: run a graph node by node, each step open to subclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, GraphError, InputError
from featx.interpret.notes import describe
from featx.interpret.plan import Plan, modes_restored
from featx.ir.arguments import Argument
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.verify import find_attribute
from featx.rebuilding import with_items

_NOTHING = object()
# Arguments that stand for themselves, found by one lookup.
_ATOMS = frozenset({int, float, bool, str, complex, bytes, type(None), type(Ellipsis), torch.dtype, torch.device})


class Interpreter:
    """Runs a graph node by node. Subclass it to watch what the nodes compute, or to compute something else.

    `run` calls `run_node` for each node, and that the method named after its opcode: `placeholder`, `get_attr`,
    `call_function`, `call_method`, `call_module` or `output`. Override any of them. What is computed is what the
    generated code computes, modes of gradients and autocast included; the module and its graph are not changed.

    `env` maps each node that has run to its value, as long as the value is needed. An error that a node raises keeps
    its type and gets a note that names the node and its line in the model, unless `extra_traceback` is False.

    Args:
        module: a `GraphModule`, whose present graph runs, or with `graph` any module that has the targets of that.
        garbage_collect_values: drop each value from `env` after its last use. Values that nothing reads stay.
        graph: what to run instead of the graph of `module`.

    Raises:
        ArgumentTypeError: there is no featx graph to run.
    """

    def __init__(self, module: nn.Module, garbage_collect_values: bool = True, graph: Graph | None = None) -> None:
        self.module = module
        self.garbage_collect_values = garbage_collect_values
        self.env: dict[Node, Any] = {}
        self.name = "Interpreter"
        self.extra_traceback = True
        # The inputs by position that no placeholder has taken yet, and those by name.
        self.args_iter: Iterator[Any] = iter(())
        self._keywords: dict[str, Any] = {}
        self._given_graph = graph
        self._given_last_uses: Mapping[Node, list[Node]] | None = None
        self._known_plan: Plan | None = None
        if not isinstance(getattr(self, "graph", None), Graph):
            raise ArgumentTypeError(
                f"{type(module).__name__} has no featx graph to run; "
                "pass what featx.trace or featx.symbolic_trace returns, or a graph as well"
            )

    @property
    def graph(self) -> Graph:
        """What runs: the graph that was given, or else the present one of the module."""
        return cast(Any, self.module).graph if self._given_graph is None else self._given_graph

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self._given_graph = graph

    @cached_property
    def submodules(self) -> dict[str, nn.Module]:
        """The submodules of the module by path, as they were when this was first read."""
        return dict(self.module.named_modules(remove_duplicate=False))

    @property
    def user_to_last_uses(self) -> Mapping[Node, list[Node]]:
        """For each node, the values to drop when it has run. Assign another mapping to drop others."""
        return self._plan.last_uses if self._given_last_uses is None else self._given_last_uses

    @user_to_last_uses.setter
    def user_to_last_uses(self, last_uses: Mapping[Node, list[Node]]) -> None:
        self._given_last_uses = last_uses

    # -- running -----------------------------------------------------------------------------------------------------

    def run(
        self,
        *args: Any,
        initial_env: dict[Node, Any] | None = None,
        enable_io_processing: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run the graph on inputs as the module takes them, by position or by name, and return its output.

        Keyword-only inputs may also be given by position, in their order, as with torch.fx. Editing the graph
        meanwhile is safe: nodes are visited as `NodeList` says, and from then on no value is dropped. O(nodes + edges)
        besides what the nodes do.

        Args:
            args: inputs by position.
            initial_env: values of nodes that are not to run. It is copied.
            enable_io_processing: without effect: featx's graphs take and return values as they are.
            kwargs: inputs by name.

        Raises:
            InputError: the graph takes other inputs; the message lists them.
        """
        env = dict(initial_env or {})
        self._check_inputs(len(args), kwargs, env)
        self.args_iter, self._keywords = iter(args), kwargs
        return self._run_nodes(env)

    def boxed_run(self, args_list: list[Any]) -> Any:
        """Run the graph on one value for each placeholder, and return its output.

        `args_list` is emptied, so that an input whose last use has passed is freed.

        Raises:
            InputError: there are more values than placeholders, or fewer; `args_list` is left as it was.
        """
        inputs = self._plan.inputs
        if len(args_list) != len(inputs):
            raise self._input_error(f"{len(args_list)} values are given for these {len(inputs)}")
        env = dict(zip(inputs, args_list, strict=True))
        args_list.clear()
        return self._run_nodes(env)

    def _run_nodes(self, env: dict[Node, Any]) -> Any:
        self.env = env
        graph, node = self.graph, None
        edits = graph.edits
        last_uses = self.user_to_last_uses if self.garbage_collect_values else {}
        with modes_restored(self._plan.switches, env):
            try:
                for node in graph.nodes:
                    if node not in env:
                        env[node] = self.run_node(node)
                    if graph.edits != edits:
                        last_uses = {}
                    for value in last_uses.get(node, ()):
                        env.pop(value, None)
                    if node.op == "output":
                        return env[node]
            except Exception as error:
                if node is not None and self.extra_traceback:
                    error.add_note(describe(node))
                raise
        return None

    def run_node(self, n: Node) -> Any:
        """Return the value of `n`, whose inputs are in `env`, from the method named after its opcode."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, args, kwargs)

    # -- one method for each opcode ----------------------------------------------------------------------------------

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the next of the inputs that `run` got; `args` holds the default, if there is one.

        Raises:
            InputError: it was not given and has no default, or was given twice.
        """
        name: str = target
        if name.startswith("**"):
            rest, self._keywords = self._keywords, {}
            return rest
        if name.startswith("*"):
            return tuple(self.args_iter)
        value = next(self.args_iter, _NOTHING)
        if name in self._keywords:
            if value is not _NOTHING:
                raise self._input_error(f"'{name}' is given by position and by name")
            return self._keywords.pop(name)
        if value is not _NOTHING:
            return value
        if not args:
            raise self._input_error(f"'{name}' is not given")
        return args[0]

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the parameter, buffer or attribute of the module at the path `target`."""
        return self.fetch_attr(target)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `target(*args, **kwargs)`."""
        return target(*args, **kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the method named `target` of `args[0]` with the other arguments."""
        return getattr(args[0], target)(*args[1:], **kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the submodule at the path `target`."""
        return self.fetch_attr(target)(*args, **kwargs)

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the graph returns, `args[0]`."""
        return args[0]

    # -- values ------------------------------------------------------------------------------------------------------

    def fetch_attr(self, target: str) -> Any:
        """Return what is at a dotted path of the module now.

        Raises:
            TargetError: nothing is there; the message names the part of the path that is missing.
        """
        return find_attribute(self.module, target)

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `n` with values in place of nodes."""
        kwargs = n.kwargs
        return self.map_nodes_to_values(n.args, n), self.map_nodes_to_values(kwargs, n) if kwargs else {}

    def map_nodes_to_values(self, args: Argument, n: Node) -> Any:
        """Return `args`, an argument of `n`, with values in place of nodes, and plain lists and dicts.

        Raises:
            GraphError: the value of a node in it is not in `env`.
        """
        try:
            return self._value_of(args)
        except KeyError as error:
            missing: Node = error.args[0]
            raise GraphError(
                f"node '{n.name}' reads '{missing.name}', which has not run or whose value was dropped; check the "
                "order with graph.lint(), or keep all values with garbage_collect_values=False if the graph is edited "
                "while it runs"
            ) from None

    def _value_of(self, argument: Argument) -> Any:
        env, value_of, kind = self.env, self._value_of, type(argument)
        if kind is tuple:
            return tuple(
                [
                    env[item] if type(item) is Node else item if type(item) in _ATOMS else value_of(item)
                    for item in argument
                ]
            )
        if kind in _ATOMS:
            return argument
        if isinstance(argument, Node):
            return env[argument]
        if isinstance(argument, tuple):
            return with_items(argument, [value_of(item) for item in argument])
        if isinstance(argument, list):
            return [value_of(item) for item in argument]
        if isinstance(argument, dict):
            return {key: value_of(item) for key, item in argument.items()}
        if kind is slice:
            return slice(value_of(argument.start), value_of(argument.stop), value_of(argument.step))
        if isinstance(argument, torch.Tensor):
            # A GraphModule keeps it, and moves it with its weights to another device.
            name = getattr(self.module, "_literal_names", {}).get(id(argument))
            return argument if name is None else getattr(self.module, name)
        return argument

    # -- what is known of the graph ----------------------------------------------------------------------------------

    @property
    def _plan(self) -> Plan:
        plan, graph = self._known_plan, self.graph
        if plan is None or plan.graph is not graph or plan.edits != graph.edits:
            plan = self._known_plan = Plan(graph)
        return plan

    def _check_inputs(self, count: int, keywords: dict[str, Any], env: dict[Node, Any]) -> None:
        targets: list[str] = [node.target for node in self._plan.inputs if node not in env]
        names = {target for target in targets if not target.startswith("*")}
        if count > len(names) and not any(target.startswith("*") and target[1] != "*" for target in targets):
            raise self._input_error(f"{count} are given by position")
        unknown = [name for name in keywords if name not in names]
        if unknown and not any(target.startswith("**") for target in targets):
            raise self._input_error(f"{', '.join(map(repr, unknown))} is none of them")

    def _input_error(self, what: str) -> InputError:
        inputs = [f"{node.target}{' (optional)' if node.args else ''}" for node in self._plan.inputs]
        return InputError(
            f"the graph of {self.module._get_name()} takes the inputs {', '.join(inputs) or '(none)'}: {what}"
        )
