"""Compare the values of featx's extractors with forward hooks on the untouched model, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from models import build, build_without_weights, can_be_made_for, floats_of, input_shapes, make_input, seeded
from parity_records import EQUAL, MODES, TRACED, Mode, Outcome, Record, message_of
from torch import nn
from torch.utils._pytree import tree_leaves

import featx

# Numbers of parameters from which on a model is made for images of 8 x 8 patches, and in bfloat16.
_LARGE, _SIDE_OF_LARGE = 400_000_000, 112
_HUGE = 2_500_000_000
BATCHES: dict[Mode, int] = {"train": 2, "eval": 1}


@dataclass
class Plan:
    """Which nodes of one mode are compared, and with what.

    Attributes:
        calls: name of a node to the module whose output it is, and which call of that module: 0 is the first.
        output: the last node, and which tensor of the model's output it is; None where it is none.
        alone: the one that is asked for once more without the others, so that what it does not need is cut away.
    """

    calls: dict[str, tuple[str, int]]
    alone: str
    output: tuple[str, int] | None

    @property
    def names(self) -> list[str]:
        """The names of all nodes that are compared."""
        return list(dict.fromkeys([*self.calls, *([self.output[0]] if self.output else [])]))


def check_values(record: Record) -> None:
    """Fill in `record` for the model that it names, in eval mode at batch 1 and in train mode at batch 2.

    The model runs with its own initialization, at the smallest of the sizes to try that it takes, and from the same
    seed each time. A large one is made for small images where it can be, a huge one in bfloat16.
    """
    model = build_without_weights(record.library, record.model)
    record.parameters = sum(parameter.numel() for parameter in model.parameters())
    side: int | None = None
    if record.parameters > _LARGE and can_be_made_for(record.library, record.model, _SIDE_OF_LARGE):
        side = _SIDE_OF_LARGE
        model = build_without_weights(record.library, record.model, side)
    try:
        plans: dict[Mode, Plan] = {mode: plan(model.train(mode == "train")) for mode in MODES}
    except Exception as error:  # whatever a model raises in a trace is the answer
        record.featx = message_of(error)
        return
    record.featx = TRACED
    *smaller, shape = input_shapes(record.library, record.model, model)
    shape = (3, side, side) if side else next((size for size in smaller if takes(model, size)), shape)
    record.pixels = math.prod(shape)
    del model
    with floats_of(torch.bfloat16 if record.parameters > _HUGE else torch.float32):
        model = build(record.library, record.model, side=side)
        for mode in MODES:
            record.modes[mode] = _compare(model, mode, plans, make_input(shape, BATCHES[mode]))


def takes(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Say whether a model without weights runs on images of `shape` in both modes."""
    try:
        with torch.no_grad():
            for mode in MODES:
                model.train(mode == "train")(make_input(shape, BATCHES[mode]).to("meta"))
    except Exception:  # whatever a model raises: the size is not one that it takes
        return False
    return True


class _ReturnTracer(featx.FeatureTracer):
    """Traces as extractors do, and notes what each module that is traced through returns."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: dict[str, list[Any]] = {}

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_module(m, forward, args, kwargs)
        self.returned.setdefault(self.path_of_module(m), []).append(result)
        return result


def plan(model: nn.Module) -> Plan:
    """Choose a middle and the last call of a leaf module, a module in the middle that is no leaf, and the output.

    A module that is no leaf is taken if it runs once and returns the last value made in it: that is what its path means
    to an extractor.
    """
    tracer = _ReturnTracer()
    graph = tracer.trace(model)
    calls = calls_of_modules(graph)
    names = list(calls)
    prefixes = _last_value_modules(graph, tracer.returned, calls)
    chosen = [*names[len(names) // 2 :][:1], *prefixes[len(prefixes) // 2 :][:1], *names[-1:]]
    alone = chosen[0] if chosen else ""
    return Plan({name: calls.get(name, (name, 0)) for name in chosen}, alone, _output_of(graph))


def calls_of_modules(graph: featx.Graph) -> dict[str, tuple[str, int]]:
    """Return for the name of each module call the path of the module, and which of its calls it is."""
    counts: dict[str, int] = {}
    calls: dict[str, tuple[str, int]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            path = str(node.target)
            calls[node.meta["qualified_name"]] = (path, counts.get(path, 0))
            counts[path] = counts.get(path, 0) + 1
    return calls


def _last_value_modules(graph: featx.Graph, returned: dict[str, list[Any]], leaves: dict[str, Any]) -> list[str]:
    last: dict[str, featx.Node] = {}
    for node in graph.nodes:
        name: str = node.meta.get("qualified_name", "")
        while "." in name:
            name = name.rpartition(".")[0]
            last[name] = node
    return [
        path
        for path, results in returned.items()
        if path not in leaves and len(results) == 1 and getattr(results[0], "node", None) is last.get(path, graph)
    ]


def _output_of(graph: featx.Graph) -> tuple[str, int] | None:
    node = [node for node in graph.nodes if "qualified_name" in node.meta][-1]
    result = graph.output_node().args
    if isinstance(result[0], featx.Node) and isinstance(result[0].target, type):
        result = result[0].args  # a dict of some class, which is built in the graph
    for index, leaf in enumerate(tree_leaves(result)):
        if leaf is node:
            return node.meta["qualified_name"], index
    return None


@dataclass
class _Observer:
    """Collects the outputs of modules, cloned when they are made: later calls may overwrite them."""

    model: nn.Module
    outputs: dict[str, list[list[torch.Tensor]]] = field(default_factory=lambda: dict[str, list[list[torch.Tensor]]]())

    @contextmanager
    def watching(self, paths: set[str]) -> Generator[None, None, None]:
        modules = dict(self.model.named_modules())
        handles = [modules[path].register_forward_hook(self._hook(path)) for path in paths]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.outputs.setdefault(path, []).append(cloned(output))

        return hook


def _compare(model: nn.Module, mode: Mode, plans: dict[Mode, Plan], images: torch.Tensor) -> Outcome:
    chosen = plans[mode]
    if not chosen.names:
        return Outcome("not comparable", "no module call, and the last node is not in the output")
    model.train(mode == "train")
    try:
        expected = _observe(model, chosen, images)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return Outcome("model fails", message_of(error))
    try:
        differences = _differences(model, mode, plans, images, expected)
    except Exception as error:  # whatever an extractor raises is what the check found
        if is_out_of_memory(error):
            raise
        return Outcome("extractor fails", message_of(error))
    if differences:
        return Outcome("different", "; ".join(differences))
    finite = all(bool(value.isfinite().all()) for values in expected.values() for value in values)
    return Outcome(EQUAL, ", ".join(expected) + ("" if finite else " (not all values are finite)"))


def _differences(
    model: nn.Module, mode: Mode, plans: dict[Mode, Plan], images: torch.Tensor, expected: dict[str, list[torch.Tensor]]
) -> list[str]:
    together = {key: plans[key].names for key in MODES}
    alone = {key: [plans[key].alone or plans[key].names[-1]] for key in MODES}
    found: list[str] = []
    for request, how in ((together, "with others"), (alone, "alone")):
        extractor = featx.create_feature_extractor(
            model,
            train_return_nodes=request["train"],
            eval_return_nodes=request["eval"],
            suppress_diff_warning=True,
            tracer="symbolic",
        )
        for name, value in run_seeded(extractor.train(mode == "train"), extractor, images).items():
            problem = difference(cloned(value), expected[name])
            if problem:
                found.append(f"`{name}` {how}: {problem}")
    return found


def _observe(model: nn.Module, chosen: Plan, images: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    observer = _Observer(model)
    with observer.watching({path for path, _ in chosen.calls.values()}):
        output = run_seeded(model, model, images)
    expected = {name: observer.outputs[path][call] for name, (path, call) in chosen.calls.items()}
    if chosen.output is not None:
        name, index = chosen.output
        expected.setdefault(name, cloned(tree_leaves(output)[index]))
    return expected


def run_seeded(function: Callable[..., Any], module: nn.Module, images: torch.Tensor) -> Any:
    """Call a function from a fixed seed on a copy of `images`, and leave the buffers of `module` as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.no_grad(), seeded():
        result = function(images.clone())
        for buffer, before in buffers:
            buffer.copy_(before)
    return result


def cloned(value: Any) -> list[torch.Tensor]:
    """Return copies of the tensors inside a nested value."""
    return [leaf.clone() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def difference(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Say how two lists of tensors differ in one bit or more; nothing if they do not."""
    if len(ours) != len(expected):
        return f"{len(ours)} tensors, expected {len(expected)}"
    for one, other in zip(ours, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {list(one.shape)}, expected {other.dtype} {list(other.shape)}"
        if not _is_same(one, other):
            return f"largest difference {(one.double() - other.double()).abs().max():.3g}"
    return ""


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Bytes, because a NaN does not equal itself.
    return torch.equal(one, other) or torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is that the limit of memory was reached."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
