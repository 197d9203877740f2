"""Follow the tensors that are real during a symbolic trace: the model's own, and those that it makes.

A model may compute with its buffers alone, or with tensors that it makes from constants. No proxy is involved, so the
call runs, and shapes and types are known; it is recorded all the same. When the trace is done, calls that nothing uses
are erased, and tensors made from constants alone that nothing writes are folded to literals. So the graph reads buffers
when it runs, not the values that they had during the trace, and each run has its own copy of what it writes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, ControlFlowError, ModulePathError, TraceError
from featx.ir.arguments import Argument, map_arg
from featx.ir.effects import Effects
from featx.ir.graph import Graph
from featx.ir.memory import MemoryGroups, memory_of
from featx.ir.modules import walk_modules
from featx.ir.node import Node
from featx.ir.operator_facts import draws_now, facts_of, targets_of_write
from featx.tracing.nodes.grad_modes import GradModes
from featx.tracing.nodes.proxy import refusal
from featx.tracing.objects.module_parts import has_forward_hooks
from featx.tracing.replica.hooks import STORED_BY_HOOK, ModelHooks
from featx.tracing.replica.model_context import ModelTensors
from featx.tracing.stand_ins.kernels import Kernels
from featx.tree import tensors_in

if TYPE_CHECKING:
    from featx.tracing.symbolic.tracer import Tracer


class RealTensors:
    """The real tensors of one trace of `root`.

    Args:
        tracer: makes the nodes.
        root: the module whose code runs.
        original: the model, of which `root` may be a replica.
    """

    def __init__(self, tracer: Tracer, root: nn.Module, original: nn.Module | None = None) -> None:
        self._tracer = tracer
        self._root = root
        self._original = root if original is None else original
        # Results of recorded calls by identity: the tensor (kept alive, or its id would be reused), its node, and
        # whether it comes from the model's own tensors.
        self._made: dict[int, tuple[torch.Tensor, Node, bool]] = {}
        self._recorded: list[Node] = []
        self._grad_modes = GradModes(tracer.create_node)
        # Memory of tensors that are older than the trace and not registered in the model.
        self._foreign: set[int] = set()
        # Memory whose real values are not those that the graph will see.
        self._stale: set[int] = set()

    def path_of(self, tensor: object) -> str | None:
        """Return the dotted path of a tensor that the model owns, else None."""
        return self._paths.get(id(tensor))

    def was_made(self, value: object) -> bool:
        """Say whether `value` is a tensor that a recorded call made."""
        return id(value) in self._made

    @functools.cached_property
    def _paths(self) -> dict[int, str]:
        # Made at the first question: a model of leaf modules alone never asks.
        return ModelTensors(_paths_of(self._root)).paths

    @functools.cached_property
    def _hooks(self) -> ModelHooks:
        hooked = [path for module, path in _paths_of(self._root).items() if has_forward_hooks(module)]
        return ModelHooks(hooked, self._root, self._original)

    def argument(self, tensor: torch.Tensor) -> Argument:
        """Return what stands for `tensor` in the graph: a read of the model, the node that made it, or itself.

        Raises:
            ModulePathError: it is a parameter that is not registered in the model.
            TraceError: a hook of the model may have stored it.
        """
        path = self._paths.get(id(tensor))
        if path is not None:
            return self._tracer.create_node("get_attr", path, (), {})
        made = self._made.get(id(tensor))
        if made is not None:
            return made[1]
        if isinstance(tensor, nn.Parameter):
            what = (
                f"a parameter of shape {tuple(tensor.shape)} that the model does not own is used: its module is not "
                "installed as a submodule, or the parameter is not a member of this module,"
            )
            raise refusal(
                self._tracer,
                ModulePathError,
                what,
                "assign it to the model, or keep the module that has it in an nn.ModuleList",
            )
        if self._hooks.keep(tensor):
            raise refusal(self._tracer, TraceError, STORED_BY_HOOK, "let forward compute it")
        return tensor

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a torch call without traced arguments: record it, and run it where that changes nothing outside.

        Random draws do not run, so that no draw is fixed; neither do writes that involve the model's tensors. Results
        whose shape depends on values of these are proxies.

        Raises:
            ControlFlowError: the model asks for the values of its own tensors, on which a graph cannot depend.
        """
        name = function.__name__
        tensors = tensors_in((args, kwargs))
        is_own = any(self._is_own(tensor) for tensor in tensors)
        if function is torch._C._set_grad_enabled:
            self._grad_modes.record(args[0])
            return function(*args)
        if name == "__set__":
            self.refuse_assignment(function, args[0])
        if draws_now(name, args, kwargs):
            return self._tracer.create_proxy("call_function", function, args, kwargs, name.strip("_"))
        if facts_of(name).reads_values:
            if is_own or any(memory_of(tensor) in self._stale for tensor in tensors):
                what = f"the values of a parameter or buffer decide what runs ({name})"
                raise refusal(self._tracer, ControlFlowError, what)
            return function(*args, **kwargs)
        if facts_of(name).writes_first or kwargs.get("out") is not None:
            self._refuse_foreign_target(args, kwargs)
            node = self._record(function, args, kwargs)
            if is_own:
                self.note_write(args, kwargs)
                return self._tracer.proxy(node)
            return function(*args, **kwargs)
        self._foreign.update(
            memory_of(tensor) for tensor in tensors if id(tensor) not in self._paths and id(tensor) not in self._made
        )
        dynamic: list[bool] = []
        kernels = Kernels(lambda *kernel: None, lambda *write: None, lambda: dynamic.append(True))
        with kernels if is_own else nullcontext():
            result = function(*args, **kwargs)
        if dynamic:  # `self.mask.nonzero()` may have another length when the graph runs
            return self._tracer.create_proxy("call_function", function, args, kwargs, name.strip("_"))
        if any(memory_of(tensor) in self._stale for tensor in tensors):
            self._stale.update(memory_of(leaf) for leaf in tensors_in(result))
        self._remember(function, args, kwargs, result, is_own)
        return result

    def note_write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the graph writes into the first real tensor, or `out`, of a call that does not run."""
        self._refuse_foreign_target(args, kwargs)
        for leaf in _targets(args, kwargs):
            self._stale.add(memory_of(leaf))

    def refuse_assignment(self, function: Callable[..., Any], tensor: torch.Tensor) -> None:
        """Raise: an assignment such as `tensor.data = value` is no call that a graph could hold."""
        attribute: str = cast(Any, function).__self__.__name__
        owner = self.path_of(tensor) or "a tensor"
        what = f"forward assigns to '{attribute}' of {owner}"
        raise refusal(self._tracer, TraceError, what, "write into the tensor instead: tensor.copy_(value)")

    def _refuse_foreign_target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A tensor that is older than the trace and not registered: in a list or dict of the model, or a global.
        for leaf in _targets(args, kwargs):
            is_foreign = id(leaf) not in self._paths and id(leaf) not in self._made
            if is_foreign or memory_of(leaf) in self._foreign:
                what = f"forward writes into a tensor of shape {tuple(leaf.shape)} that the model does not own"
                raise refusal(self._tracer, ModulePathError, what, "register that tensor as a buffer of the model")

    def finish(self, graph: Graph) -> None:
        """Erase recorded calls that nothing uses, and fold constants that nothing writes to literals."""
        if not self._recorded:
            return
        effects = Effects(graph, self._root)
        memory = MemoryGroups(graph, effects)
        written = {memory.of(target) for node in graph.nodes for target in effects.of(node).writes}
        # A constant is computed from constants alone, none of which the graph writes.
        pure: set[Node] = set()
        for node in self._recorded:
            if memory.of(node) not in written and all(source in pure for source in node.all_input_nodes):
                pure.add(node)
        constants = {node: tensor for tensor, node, is_own in self._made.values() if not is_own and node in pure}
        for node, tensor in constants.items():
            for user in list(node.users):
                _replace(user, node, tensor)
        for node in reversed(self._recorded):
            if not node.users and not effects.of(node).writes:
                inputs = node.all_input_nodes
                graph.erase_node(node)
                for source in inputs:
                    if source.op == "get_attr" and not source.users and "qualified_name" not in source.meta:
                        graph.erase_node(source)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        made = self._made.get(id(tensor))
        return id(tensor) in self._paths if made is None else made[2]

    def _remember(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any, is_own: bool) -> None:
        results: Any = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(results, (list, tuple)) or not any(isinstance(item, torch.Tensor) for item in results):
            return
        try:
            node = self._record(function, args, kwargs)
        except ArgumentTypeError:
            return  # an argument that no graph can hold: the result stays a literal
        for index, item in enumerate(results):
            if isinstance(item, torch.Tensor) and id(item) not in self._paths and id(item) not in self._made:
                part = node
                if results is result:
                    part = self._tracer.create_node("call_function", operator.getitem, (node, index), {})
                    self._recorded.append(part)
                self._made[id(item)] = (item, part, is_own)

    def _record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        # Not through create_proxy: torchvision's names know nothing of these nodes.
        create_arg, name = self._tracer.create_arg, function.__name__
        arguments, keywords = create_arg(args), create_arg(kwargs)
        if name == "__get__":
            owner: Any = function
            arguments, keywords = (arguments[0], owner.__self__.__name__), {}
            node = self._tracer.create_node("call_function", getattr, arguments, keywords)
        elif getattr(torch.Tensor, name, None) is function:
            node = self._tracer.create_node("call_method", name, arguments, keywords)
        else:
            node = self._tracer.create_node("call_function", function, arguments, keywords)
        self._recorded.append(node)
        return node


def _paths_of(root: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in walk_modules(root)}


def _targets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return tensors_in(targets_of_write(args, kwargs))


def _replace(user: Node, node: Node, tensor: torch.Tensor) -> None:
    def swap(source: Node) -> Argument:
        return tensor if source is node else source

    user.args, user.kwargs = map_arg(user.args, swap), map_arg(user.kwargs, swap)
