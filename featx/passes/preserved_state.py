"""Run a graph and leave the model, the inputs and the random generators as they were."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from featx.ir.graph import Graph
from featx.ir.memory import memory_of
from featx.ir.overloads import Signature, tensors_among
from featx.passes.operators import OperatorMode
from featx.tracing.environment.generators import SharedGenerators, TorchGenerator
from featx.tracing.file_globals.caches import Caches
from featx.tracing.file_globals.wrapping import globals_of
from featx.tracing.model_state.attribute_changes import AttributeChanges
from featx.tree import tree_map


@contextmanager
def preserve_model(
    module: nn.Module, graph: Graph, inputs: Iterable[torch.Tensor], *, has_values: bool = True
) -> Generator[None]:
    """Put back what running `graph` on `module` leaves behind, but for values that it writes into tensors.

    That is: attributes of submodules, numbers and caches of the code of these and of functions that the graph calls,
    histories of gradients, and generators of random numbers; and where the run `has_values` not, the versions of
    tensors, at which gradients that are pending would fail. O(nodes + attributes + names in that code).
    """
    inside = [each for each in module.modules() if each is not module]
    states = AttributeChanges(inside)
    # Attributes of torch's modules too: weight norm assigns `weight`.
    # A scripted module has other mappings of its parts, which are C++'s.
    parts: list[Any] = [each for each in inside if not isinstance(each, torch.jit.ScriptModule)]
    dicts: list[dict[str, Any]] = [
        held for each in parts for held in (each.__dict__, each._parameters, each._buffers, each._modules)
    ]
    kept = [(held, held.copy()) for held in dicts]
    tensors = [*module.parameters(), *module.buffers(), *inputs]
    leaves = [tensor for tensor in tensors if tensor.grad_fn is None]
    versions = [] if has_values else [(each, each._version) for each in tensors if not each.is_inference()]
    with _caches_kept(inside, graph), _casts_kept(), _generators_kept(tensors, has_values):
        try:
            yield
        finally:
            changed = [(each, version) for each, version in versions if each._version != version]
            if changed:
                cast("Any", torch._C)._autograd._unsafe_set_version_counter(*map(tuple, zip(*changed, strict=True)))
            states.restore()
            for held, before in kept:
                if len(held) != len(before) or any(value is not before.get(name) for name, value in held.items()):
                    held.clear()
                    held.update(before)
            for tensor in leaves:
                if tensor.grad_fn is not None:
                    tensor.detach_()


@contextmanager
def _casts_kept() -> Generator[None]:
    # Autocast remembers what it made of the weights until the outermost region ends, which may be the caller's.
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(is_enabled)
        torch.clear_autocast_cache()


@contextmanager
def _caches_kept(modules: Iterable[nn.Module], graph: Graph) -> Generator[None]:
    kinds = {type(module) for module in modules if not type(module).__module__.startswith("torch.nn.")}
    called = {node.target for node in graph.nodes if node.op == "call_function"}
    functions = [inspect.unwrap(target) for target in called]
    others = ("torch.", "featx.")
    own = [each for each in functions if inspect.isfunction(each) and not str(each.__module__).startswith(others)]
    namespaces = [globals_of(function, ()) for function in own] if own else []
    classes = globals_of(len, kinds) if kinds else []
    found = {id(each): each for each in (*classes, *(each for several in namespaces for each in several))}
    caches = Caches(found.values(), kinds)
    try:
        yield
    finally:
        caches.restore(_has_no_values)


def _has_no_values(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


@contextmanager
def _generators_kept(tensors: Iterable[torch.Tensor], has_values: bool) -> Generator[None]:
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    with ExitStack() as stack:
        stack.callback(SharedGenerators().restore)
        if not has_values:  # operators draw nothing then, so that other threads may draw meanwhile; code may seed
            stack.callback(TorchGenerator().restore)
            yield
            return
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            stack.enter_context(torch.random.fork_rng(devices=[device.index or 0], device_type=device.type))
        yield


class WrittenMemory(OperatorMode):
    """While it is entered, copies memory from before it that an operator is about to write; `restore` puts it back.

    What is made meanwhile is not copied. Generators that are given to operators are put back too. A few microseconds
    for each operator, and one copy of what is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._saved: dict[int, tuple[torch.Tensor, Any]] = {}
        # Tensors that are about to get other memory or another shape, and how to lay them out again.
        self._layouts: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def on_operator(self, func: Any, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator."""
        if signature is None:
            return func(*args, **kwargs)
        for target in signature.targets(args, kwargs):
            self._save(target, signature.replaces_memory)
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            self._generators.setdefault(id(generator), (generator, generator.get_state()))
        result = func(*args, **kwargs)
        if not signature.is_view and not signature.written:
            self._made.update(map(memory_of, tensors_among((result,))))
        return result

    def _save(self, tensor: torch.Tensor, is_laid_out_anew: bool) -> None:
        memory = memory_of(tensor)
        if memory in self._made:
            return
        if memory not in self._saved:
            is_plain = tensor.layout is torch.strided
            self._saved[memory] = (tensor, tensor.untyped_storage().clone() if is_plain else tensor.detach().clone())
        if is_laid_out_anew and tensor.layout is torch.strided:
            layout = (tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            self._layouts.setdefault(id(tensor), (tensor, layout))

    def restore(self) -> None:
        """Put back what was written so far; it stays saved, so this may be called after each of many runs."""
        with torch.no_grad():
            for tensor, layout in self._layouts.values():
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*layout)
            for tensor, saved in self._saved.values():
                if isinstance(saved, torch.Tensor):
                    tensor.copy_(saved)
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() != saved.nbytes():
                    storage.resize_(saved.nbytes())
                storage.copy_(saved)
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
        for generator, state in self._generators.values():
            generator.set_state(state)

    def apart(self, value: Any) -> Any:
        """Return `value` with a copy of each tensor in it whose memory `restore` writes."""
        return tree_map(lambda leaf: leaf.clone() if self._is_saved(leaf) else leaf, value) if self._saved else value

    def _is_saved(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and memory_of(value) in self._saved
