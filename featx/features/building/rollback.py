"""Run graphs that may find out in the middle that they do not hold, and put back what they have done until then."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from featx.errors import TraceError
from featx.ir.effects import Effects
from featx.ir.graph import Graph
from featx.ir.memory import MemoryGroups
from featx.ir.modules import modules_of
from featx.ir.node import Node
from featx.ir.torch_layers import is_torch_layer
from featx.saved_tensor import SavedTensor
from featx.tracing.environment.compiler import not_compiled, not_compiled_itself
from featx.tracing.environment.generators import rng_state
from featx.tracing.model_state.module_state import ModuleState
from featx.tree import tree_leaves


@dataclass(frozen=True)
class _Facts:
    """What is known of a graph.

    Attributes:
        edits: how often it had been edited when it was looked at.
        has_early_effects: whether something is written or drawn before one of its checks.
        written: the paths of tensors of the module that it may write, beside buffers.
        opaque_paths: the paths of modules with Python code that it calls before one of its checks.
        modes: the modules that it calls, with what is in them, and whether each was in train mode.
    """

    edits: int
    has_early_effects: bool
    written: tuple[str, ...]
    opaque_paths: tuple[str, ...]
    modes: tuple[tuple[nn.Module, bool], ...]

    def hold_for(self, graph: Graph) -> bool:
        """Say whether neither the graph nor a mode has changed. O(modules that the graph calls)."""
        return self.edits == graph.edits and all(module.training is mode for module, mode in self.modes)


class RollbackRunner:
    """Runs graphs, and knows for each what it may do before one of its checks."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Graph, _Facts] = WeakKeyDictionary()

    @not_compiled_itself
    def run(
        self,
        run: Callable[..., dict[str, Any]],
        graph: Graph,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Return `run(*args, **kwargs)`; where the graph does not hold, put back what it has written and drawn.

        These are the inputs, buffers, parameters that forward writes, the attributes of submodules that are kept whole
        (with what the lists, dicts and objects among them hold), and the random generators. What code keeps outside of
        the modules is not put back. Free of cost where nothing of this comes before a check; else O(inputs, buffers
        and written parameters), and O(attributes) of modules that are kept whole.

        Args:
            run: what runs the graph.
            graph: says whether there is anything to put back.
            module: has the buffers and parameters.
            args: the inputs.
            kwargs: those by name.

        Raises:
            TraceError: the graph does not hold for these inputs.
        """
        facts = self._facts_of(graph, module)
        if not facts.has_early_effects and not facts.opaque_paths:
            return run(*args, **kwargs)
        states = _PythonStates(module, facts.opaque_paths)
        tensors = _Snapshot(module, facts.written, (args, kwargs)) if facts.has_early_effects else None
        try:
            return run(*args, **kwargs)
        except TraceError:
            states.restore()
            if tensors is not None:
                tensors.restore()
            raise

    @not_compiled
    def _facts_of(self, graph: Graph, module: nn.Module) -> _Facts:
        known = self._known.get(graph)
        if known is None or not known.hold_for(graph):
            known = self._known[graph] = _find_facts(graph, module)
        return known

    def __reduce__(self) -> tuple[type[RollbackRunner], tuple[()]]:
        return RollbackRunner, ()


def _find_facts(graph: Graph, module: nn.Module) -> _Facts:
    effects = Effects(graph, module)
    last_check = next((node for node in reversed(graph.nodes) if node.meta.get("is_guard")), None)
    early = [] if last_check is None else [node for node in graph.nodes if node < last_check]
    opaque_paths = tuple({str(node.target): None for node in early if _may_keep_state(node, effects)})
    called = filter(None, map(effects.module_of, graph.find_nodes(op="call_module")))
    inside = dict.fromkeys(chain.from_iterable(map(modules_of, called)))
    modes = tuple([(each, each.training) for each in inside])  # dropout draws in train mode only
    for node in early:
        is_check = node.op == "placeholder" or node.meta.get("is_guard") or effects.of(node).is_check
        if not is_check and effects.is_impure(node):
            return _Facts(graph.edits, True, tuple(_written_by(graph, effects)), opaque_paths, modes)
    return _Facts(graph.edits, False, (), opaque_paths, modes)


def _may_keep_state(node: Node, effects: Effects) -> bool:
    """Say whether a call may change plain attributes of a module: by code that is not torch's, or by a hook."""
    if node.op != "call_module" or (module := effects.module_of(node)) is None:
        return False
    return any(
        not is_torch_layer(type(each)) or each._forward_hooks or each._forward_pre_hooks for each in modules_of(module)
    )


def _written_by(graph: Graph, effects: Effects) -> Iterator[str]:
    """Yield the paths of the tensors that a graph may write: those that it reads, and the parameters of modules."""
    memory = MemoryGroups(graph, effects)
    written = memory.written()
    for node in graph.find_nodes(op="get_attr"):
        if memory.of(node) in written:
            yield node.target
    for node in graph.find_nodes(op="call_module"):
        module = effects.module_of(node)
        # A layer of torch writes no parameter, but a module of the user's may write those of its layers.
        if module is not None and effects.of(node).writes_state and not is_torch_layer(type(module)):
            yield from (f"{node.target}.{name}" for name, _ in module.named_parameters())


class _PythonStates:
    """The attributes of the modules at some paths of a module and of all that is in them."""

    @not_compiled
    def __init__(self, module: nn.Module, paths: tuple[str, ...]) -> None:
        inside = (modules_of(operator.attrgetter(path)(module)) for path in paths)
        modules = {each: None for each in chain.from_iterable(inside) if not isinstance(each, torch.jit.ScriptModule)}
        self._attributes = [ModuleState(each) for each in modules]
        values = chain.from_iterable(each.__dict__.values() for each in modules)
        self._tensors = [SavedTensor(value) for value in values if isinstance(value, torch.Tensor)]

    @not_compiled
    def restore(self) -> None:
        for state in self._attributes:
            state.restore()
        for tensor in self._tensors:
            tensor.restore()


class _Snapshot:
    """Tensors of a module, inputs and the state of the random generators.

    Of the module, these are its buffers and the tensors at the paths `written`.
    """

    @not_compiled
    def __init__(self, module: nn.Module, written: tuple[str, ...], inputs: Any) -> None:
        values = [*module.buffers(), *(operator.attrgetter(path)(module) for path in written), *tree_leaves(inputs)]
        tensors = {id(value): value for value in values if isinstance(value, torch.Tensor)}
        self._saved = [SavedTensor(tensor) for tensor in tensors.values()]
        self._generator = rng_state()
        self._on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    @not_compiled
    def restore(self) -> None:
        for each in self._saved:
            each.restore()
        torch.set_rng_state(self._generator)
        if self._on_gpus:
            torch.cuda.set_rng_state_all(self._on_gpus)
