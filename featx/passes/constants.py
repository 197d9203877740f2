"""Compute once, before all runs, what a graph computes from constants."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError
from featx.ir.arguments import Argument, map_arg
from featx.ir.memory import memory_of
from featx.ir.node import Node
from featx.ir.repeatable import depends_on_mode
from featx.ir.rewiring import replace_inputs
from featx.ir.verify import find_attribute
from featx.module import GraphModule, check_graph_module
from featx.passes.accesses import Accesses
from featx.passes.modes import Modes
from featx.tracing.guards.guards import require_mode
from featx.tree import tensors_in


def fold_constants(gm: GraphModule, *, include_trainable: bool = False, max_bytes: int = 1 << 26) -> bool:
    """Replace what depends on parameters, buffers and literals alone by its value, as a buffer of `gm`.

    Folded are calls that are known only to compute a value, are not random and are not written, with tensors as
    results. What comes from parameters or buffers is read from a new buffer that is not in the state dict: it does not
    follow later changes of theirs. What comes from literals alone becomes a literal, which keeps its dtype under
    `gm.half()`. Left alone are views of the model's tensors, which cost nothing; what is returned, so that no caller
    outside can write into a constant; and calls under autocast. If a folded module differs between train and eval
    mode, the graph checks the mode from then on. Returns whether anything was folded.

    Each constant is computed, without gradients, and held until the end of the pass. O(nodes + edges) besides.

    Args:
        gm: the module whose graph is edited.
        include_trainable: fold also what depends on tensors that require gradients. They get none through it then.
        max_bytes: values that take more memory are not stored, and computed in each run as before.

    Raises:
        ArgumentTypeError: `max_bytes` is not a number of bytes.
    """
    if not isinstance(cast(object, max_bytes), int) or max_bytes < 0:
        raise ArgumentTypeError(f"max_bytes must be an int that is not negative, got {max_bytes!r}")
    folding = _Folding(check_graph_module(gm), include_trainable, max_bytes)
    folding.compute()
    folding.choose()
    folding.store()
    return bool(folding.chosen)


class _Folding:
    """The constants of the graph of `gm`: which nodes have a value before all runs, and which are replaced by it."""

    def __init__(self, gm: GraphModule, include_trainable: bool, max_bytes: int) -> None:
        self.chosen: list[Node] = []
        self._gm = gm
        self._include_trainable = include_trainable
        self._max_bytes = max_bytes
        self._accesses = Accesses(gm)
        self._modes = Modes(gm.graph, self._accesses)
        self._returned = {self._accesses.cell_of(node) for node in gm.graph.output_node().all_input_nodes}
        self._own = {id(tensor) for tensor in (*gm.parameters(), *gm.buffers())}
        self._values: dict[Node, Any] = {}
        # Those of them that come from what the module holds, and those that may be others in the other mode.
        self._from_module: set[Node] = set()
        self._of_mode: set[Node] = set()

    def compute(self) -> None:
        """Compute the values of all constant nodes."""
        with torch.inference_mode(False), torch.no_grad():
            for node in self._gm.graph.nodes:
                if not self._is_constant(node):
                    continue
                try:
                    value = self._run(node)
                except Exception:  # whatever it is, it is to be raised when the graph runs
                    continue
                if self._may_hold(node, value):
                    self._values[node] = value
                    self._note_sources(node)

    def choose(self) -> None:
        """Choose the constants that are read by what is not constant, and stand for tensors that can be stored."""
        own = {memory_of(tensor) for tensor in (*self._gm.parameters(), *self._gm.buffers())}
        for node in reversed(self._gm.graph.nodes):
            if node not in self._values or self._values.keys() >= node.users.keys():
                continue
            value = self._values[node]
            if _can_store(value) and memory_of(value) not in own:
                self.chosen.append(node)
            else:
                del self._values[node]  # it stays, and so does what it reads

    def store(self) -> None:
        """Put the values of the chosen nodes into the graph and erase what nothing reads any more."""
        if not self.chosen:
            return
        graph = self._gm.graph
        if not self._of_mode.isdisjoint(self.chosen):
            reason = "results of modules were made constants: make the graph anew for the other mode"
            require_mode(self._gm.graph, self._gm.training, reason)
        # What nothing read before may be there for what it does in the other mode.
        read = [node for node in graph.nodes if node in self._values and node.users]
        literals: dict[Node, Argument] = {}
        for node in self.chosen:
            value = _compact(self._values[node])
            if node in self._from_module:
                self._become_buffer(node, value)
            else:
                literals[node] = value
        for node in graph.nodes:
            replace_inputs(node, literals)
        for node in reversed(read):
            if not node.users:
                graph.erase_node(node)

    # -- what is constant --------------------------------------------------------------------------------------------

    def _is_constant(self, node: Node) -> bool:
        accesses, mode = self._accesses, self._modes.at(node)
        if node.op in ("placeholder", "output") or accesses.is_written(node) or not accesses.repeatable.has(node):
            return False
        if node.op == "get_attr":
            return True
        if mode.regions or mode.others or accesses.cell_of(node) in self._returned:
            return False
        module = self._module_of(node)
        if module is not None and not self._is_constant_module(node, module):
            return False
        return self._values.keys() >= set(node.all_input_nodes)

    def _module_of(self, node: Node) -> nn.Module | None:
        return self._accesses.effects.module_of(node) if node.op == "call_module" else None

    def _is_constant_module(self, node: Node, module: nn.Module) -> bool:
        if self._accesses.is_state_written(node):
            return False
        if depends_on_mode(module) and any(part.training is not self._gm.training for part in module.modules()):
            return False
        return self._include_trainable or not any(tensor.requires_grad for tensor in module.parameters())

    def _run(self, node: Node) -> Any:
        if node.op == "get_attr":
            return find_attribute(self._gm, node.target, node)
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        function = self._module_of(node) or node.target
        return function(*args, **kwargs)

    def _may_hold(self, node: Node, value: Any) -> bool:
        if node.op == "get_attr":
            return id(value) in self._own and (self._include_trainable or not value.requires_grad)
        tensors = tensors_in(value)
        return all(tensor.layout == torch.strided and _bytes_of(tensor) <= self._max_bytes for tensor in tensors)

    def _note_sources(self, node: Node) -> None:
        module, inputs = self._module_of(node), node.all_input_nodes
        is_source = node.op == "get_attr" or (module is not None and bool(module.state_dict()))
        if is_source or not self._from_module.isdisjoint(inputs):
            self._from_module.add(node)
        is_of_mode = module is not None and depends_on_mode(module)
        is_of_mode = is_of_mode or (node.op == "get_attr" and self._accesses.is_written_in_other_mode(node))
        if is_of_mode or not self._of_mode.isdisjoint(inputs):
            self._of_mode.add(node)

    def _become_buffer(self, node: Node, value: torch.Tensor) -> None:
        name = f"_folded_{node.name}"
        while hasattr(self._gm, name):
            name += "_"
        self._gm.register_buffer(name, value, persistent=False)
        node.args, node.kwargs = (), {}
        node.op, node.target = "get_attr", name
        node.meta.pop("effects", None)


def _can_store(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and not value.is_meta


def _bytes_of(tensor: torch.Tensor) -> int:
    return max(tensor.numel() * tensor.element_size(), 0 if tensor.is_meta else tensor.untyped_storage().nbytes())


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` without memory around it that nothing reads."""
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part else tensor
