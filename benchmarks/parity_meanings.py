"""Compare by value what a name means to torchvision and to `featx.create_feature_extractor` as users call it."""

from __future__ import annotations

import math
from typing import Any

import torch
from models import build, build_without_weights, input_shapes, make_input
from parity_records import EQUAL, MEANT, MODES, TRACED, Mode, Outcome, Record, message_of
from parity_values import cloned, difference, is_out_of_memory, run_seeded, takes
from torch import fx, nn
from torchvision.models import feature_extraction

import featx

# A name without a tensor or number behind it has nothing to compare; models over this size take too long.
_LARGE = 400_000_000
_BATCH = 2  # some models take no single image in train mode
_SHOWN = 6
# What these return is whatever the memory held.
_UNFILLED = ("new_empty", torch.empty, torch.empty_like)


def check_meanings(record: Record) -> None:
    """Fill in `record` for the model that it names: every name that torchvision lists, in both modes.

    The values of torchvision's names are those of the nodes of its own graph, copied when they are computed. featx's
    are what one extractor with its default tracer returns for the names that both know.
    """
    model = build_without_weights(record.library, record.model)
    record.parameters = sum(parameter.numel() for parameter in model.parameters())
    if record.parameters > _LARGE:
        record.problem = f"not run: over {_LARGE // 10**6} million parameters"
        return
    *smaller, shape = input_shapes(record.library, record.model, model)
    shape = next((size for size in smaller if takes(model, size)), shape)
    record.pixels = math.prod(shape)
    model = build(record.library, record.model)
    try:
        graphs: dict[Mode, _NamedGraph] = {mode: _NamedGraph(model.train(mode == "train")) for mode in MODES}
    except Exception as error:  # whatever a model raises in a trace is the answer
        record.torchvision = message_of(error)
        return
    record.torchvision = record.featx = TRACED
    for mode in MODES:
        record.modes[mode] = _compare(model, mode, graphs[mode], make_input(shape, _BATCH))


class _NamedGraph:
    """The graph in which torchvision looks up names."""

    def __init__(self, model: nn.Module) -> None:
        tracer = feature_extraction.NodePathTracer(**feature_extraction._set_default_tracer_kwargs(None))
        self.module = fx.GraphModule(model, tracer.trace(model))
        self.names: dict[fx.Node, str] = dict(tracer.node_to_qualname)

    def values(self, images: torch.Tensor) -> dict[str, Any]:
        """Run the graph and return a copy of what each named node gives."""
        found: dict[str, Any] = {}
        names = {node.name: name for node, name in self.names.items() if node.target not in _UNFILLED}

        class Interpreter(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                if n.name in names:
                    found[names[n.name]] = _copied(value)
                return value

        run_seeded(Interpreter(self.module).run, self.module, images)
        return found


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(map(_copied, value)) if type(value) in (tuple, list) else value


def _compare(model: nn.Module, mode: Mode, graph: _NamedGraph, images: torch.Tensor) -> Outcome:
    model.train(mode == "train")
    names = featx.get_graph_node_names(model, suppress_diff_warning=True, example_inputs=images)
    try:
        expected = graph.values(images)
    except Exception as error:  # a graph of torch.fx that does not run
        if is_out_of_memory(error):
            raise
        return Outcome("not comparable", f"torchvision's graph: {message_of(error)}")
    common = [name for name in names[mode == "eval"] if name in expected]
    other = names[mode == "train"][-1:]
    train, evaluation = (common, other) if mode == "train" else (other, common)
    try:
        extractor = featx.create_feature_extractor(
            model, train_return_nodes=train, eval_return_nodes=evaluation, suppress_diff_warning=True,
            example_inputs=images,
        )  # fmt: skip
        found = run_seeded(extractor, extractor, images)
    except Exception as error:  # whatever an extractor raises is what the check found
        if is_out_of_memory(error):
            raise
        return Outcome("extractor fails", message_of(error))
    different = [name for name in common if _difference(found[name], expected[name])]
    missing = [name for name in expected if name not in found]
    detail = f"{len(common)} names"
    if missing:
        detail += f"; {len(missing)} of torchvision's alone: {', '.join(f'`{name}`' for name in missing[:_SHOWN])}"
    real = {path for path, _ in model.named_modules()}
    if different and real.issuperset(different):
        return Outcome(MEANT, f"{len(different)} of {detail}: torchvision gives names of modules to other calls")
    if different:
        shown = ", ".join(f"`{name}`" for name in different[:_SHOWN])
        return Outcome("different", f"{len(different)} of {detail}: {shown}")
    return Outcome(EQUAL, detail)


def _difference(ours: Any, theirs: Any) -> str:
    tensors = difference(cloned(ours), cloned(theirs))
    if tensors or isinstance(ours, torch.Tensor):
        return tensors
    return "" if _numbers(ours) == _numbers(theirs) else f"{ours!r:.40}, expected {theirs!r:.40}"


def _numbers(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_numbers(item) for item in value]
    return None if isinstance(value, torch.Tensor) else value
