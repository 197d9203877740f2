"""profile: how long each node of a graph takes, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, InputError
from featx.interpret.interpreter import Interpreter
from featx.ir.names import shown_name
from featx.ir.node import Node
from featx.ir.text import format_target
from featx.passes.hierarchy import Hierarchy
from featx.passes.preserved_state import WrittenMemory, preserve_model
from featx.passes.profile_report import ModuleTime, NodeTime, ProfileReport
from featx.traced import as_graph_module, on_graph_that_holds
from featx.tree import tensors_in


def profile(
    gm: nn.Module, *args: Any, example_inputs: Any = None, repeats: int = 10, warmup: int = 2, **kwargs: Any
) -> ProfileReport:
    """Measure how long each node of a model or a graph takes for these inputs, and sum it for each module.

    The graph is run node by node, `warmup` times and then `repeats` times, in turn with calls of `gm` as a whole. A
    node's time is the median of its runs and has nothing of the interpreter in it; on an accelerator, which is waited
    for after each node, it has the launch. So times of nodes sum up to more than a call of the whole there.

    Runs in the caller's modes of gradients and autocast. Before each run, what the last one wrote into inputs and
    buffers is put back; afterwards the model, its inputs and random generators are as they were. Takes as long as
    2 * `repeats` + `warmup` + 1 runs.

    Args:
        gm: a graph module, or a model, which is traced.
        args: its inputs; for a model by default those that it declares or its first layer suggests.
        example_inputs: the inputs in place of `args` and `kwargs`: a tensor, a tuple of positional inputs, or a dict of
            inputs by name.
        repeats: how often each node is measured.
        warmup: runs before that, of at least 0; one more, in which writes are watched, always goes first.
        kwargs: inputs by name.

    Raises:
        InputError: the graph takes other inputs, or something is on the meta device, where nothing takes time.
    """
    if not all(isinstance(cast(object, number), int) for number in (repeats, warmup)) or repeats < 1 or warmup < 0:
        raise ArgumentTypeError(
            f"repeats must be at least 1 and warmup at least 0, both ints, got {repeats} and {warmup}"
        )
    gm, args, kwargs = as_graph_module(gm, args, kwargs, example_inputs)
    return on_graph_that_holds(gm, args, kwargs, lambda each: _measured(each, args, kwargs, repeats, warmup))


def _measured(gm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], repeats: int, warmup: int) -> ProfileReport:
    interpreter = _TimingInterpreter(gm)
    inputs = tensors_in((args, kwargs))
    tensors = [*gm.parameters(), *gm.buffers(), *inputs]
    if any(tensor.is_meta for tensor in tensors):
        raise InputError(
            f"{gm._get_name()} or an input is on the meta device, where nothing takes time; use real tensors"
        )
    wait = interpreter.wait = waiter_for(tensors)
    written, calls = WrittenMemory(), list[float]()

    def call_whole() -> None:
        wait()
        start = time.perf_counter()
        gm(*args, **kwargs)
        wait()
        calls.append(time.perf_counter() - start)

    with preserve_model(gm, interpreter.graph, inputs):
        try:
            with written:
                interpreter.run(*args, **kwargs)
            for _ in range(warmup):
                written.restore()
                interpreter.run(*args, **kwargs)
            interpreter.times.clear()
            for _ in range(repeats):
                written.restore()
                interpreter.run(*args, **kwargs)
                written.restore()
                call_whole()
        finally:
            written.restore()
    return _report(interpreter, median(calls), repeats)


class _TimingInterpreter(Interpreter):
    """Collects in `times`, for each node, the seconds that it took in each run."""

    def __init__(self, gm: nn.Module) -> None:
        super().__init__(gm)
        self.times: dict[Node, list[float]] = {}
        self.wait: Callable[[], None] = _nothing

    def run_node(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        run, wait = getattr(self, n.op), self.wait
        start = time.perf_counter()
        result = run(n.target, args, kwargs)
        wait()
        took = time.perf_counter() - start
        if n.op not in ("placeholder", "output"):
            self.times.setdefault(n, []).append(took)
        return result


def _nothing() -> None:
    pass


def waiter_for(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Return what waits until everything that was begun on the devices of `tensors` is done."""
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    if not devices:
        return _nothing

    def wait() -> None:
        for device in devices:
            module: Any = torch.get_device_module(device)
            module.synchronize()

    return wait


def _report(interpreter: _TimingInterpreter, call_seconds: float, repeats: int) -> ProfileReport:
    hierarchy = Hierarchy(interpreter.module)
    nodes: list[NodeTime] = []
    sums: dict[str, list[float]] = {"": []}
    total = sum(map(median, interpreter.times.values()))
    for node, times in interpreter.times.items():
        around = hierarchy.around(node)
        took = median(times)
        target = format_target(node.target)
        share = took / total if total else 0.0
        name = shown_name(node)
        nodes.append(NodeTime(node.name, node.op, target, around[-1], took, min(times), max(times), share, name))
        for path in around:
            sums.setdefault(path, []).append(took)
    modules = [
        ModuleTime(path, hierarchy.kind(path), len(times), sum(times), sum(times) / total if total else 0.0)
        for path, times in sums.items()
    ]
    return ProfileReport(tuple(nodes), tuple(modules), total, call_seconds, repeats)
