from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchvision
from drawn import Block, Sized, leaf_at
from torch import Tensor, nn

import featx
from featx.drawing.leaves import Leaf


def leaves_of(graph: Any, **options: Any) -> dict[str, Leaf]:
    return {leaf.name: leaf for leaf in featx.draw(graph, **options).root.leaves()}


@pytest.mark.slow
def test_shapes_are_those_that_hooks_see() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    seen: dict[str, str] = {}

    def note(name: str, output: Tensor) -> None:
        seen.setdefault(name, "×".join(map(str, output.shape)))

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda module, inputs, output, name=name: note(name, output))
    image = torch.rand(1, 3, 64, 64)
    model(image)
    leaves = leaves_of(featx.trace(model, image))
    assert len(seen) == 20 + 20 + 1 + 8 + 1 + 1 + 1  # convolutions, norms, relu, relus of blocks, two pools, fc
    assert {name: leaves[name].shape for name in seen} == seen
    assert {leaf.dtype for leaf in leaves.values() if leaf.shape} == {"float32"}


@pytest.mark.slow
def test_parameters_of_the_nodes_are_those_of_the_model() -> None:
    model = torchvision.models.vit_b_16(weights=None).eval()
    leaves = leaves_of(featx.trace(model, torch.rand(1, 3, 224, 224)))
    assert sum(leaf.new_parameters for leaf in leaves.values()) == sum(tensor.numel() for tensor in model.parameters())
    assert leaves["conv_proj"].parameters == 768 * 3 * 16 * 16 + 768


def test_shared_weights_count_once() -> None:
    block = Block()
    leaves = leaves_of(featx.symbolic_trace(nn.Sequential(block, nn.ReLU(), block)))
    assert (leaves["0.linear"].parameters, leaves["0.linear"].new_parameters) == (20, 20)
    assert (leaves["0.linear_1"].parameters, leaves["0.linear_1"].new_parameters) == (20, 0)


def test_lazy_weights_count_nothing() -> None:
    leaves = leaves_of(featx.symbolic_trace(nn.Sequential(nn.LazyLinear(4))))
    assert leaves["0"].parameters == 0


def test_what_nodes_are() -> None:
    leaves = leaves_of(featx.trace(Sized(), torch.ones(2, 4)))
    kinds = {name: leaf.kind for name, leaf in leaves.items()}
    assert kinds["x"] == kinds["output"] == "io"
    assert kinds["weight"] == "constant"
    assert (kinds["reshape"], kinds["flatten"], kinds["chunk"], kinds["mul"]) == ("shape", "shape", "shape", "math")
    assert (kinds["getattr"], kinds["floordiv"], kinds["gt"]) == ("number", "number", "check")
    minor = {name for name, leaf in leaves.items() if leaf.is_minor}
    assert {"getattr", "getitem", "getitem_1", "floordiv", "gt"} <= minor
    # A call that returns tensors in a tuple, and what is taken out of it, are no numbers.
    assert not minor & {"x", "weight", "reshape", "flatten", "mul", "chunk", "getitem_2", "getitem_3", "add", "output"}
    assert leaves["weight"].operation == "parameter"


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Conv1d(1, 1, 1), "layer"),
        (nn.Embedding(2, 2), "layer"),
        (nn.GroupNorm(1, 1), "norm"),
        (nn.GELU(), "activation"),
        (nn.MultiheadAttention(4, 2), "attention"),
        (nn.AdaptiveAvgPool2d(1), "pool"),
        (nn.Dropout(), "dropout"),
        (nn.Flatten(), "shape"),
        (nn.ZeroPad2d(1), "shape"),
        (nn.CosineSimilarity(), "module"),
        (nn.Sequential(nn.Conv1d(1, 1, 1)), "module"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else value,
)
def test_kinds_of_leaf_modules(module: nn.Module, kind: str) -> None:
    graph = featx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    leaves = leaves_of(featx.GraphModule({"inner": module}, graph))
    assert (leaves["inner"].kind, leaves["inner"].operation) == (kind, type(module).__name__)


def test_settings_are_what_the_module_prints() -> None:
    leaves = leaves_of(featx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2))))
    assert leaves["0"].settings == "3, 8, kernel_size=(3, 3), stride=(2, 2)"


def test_sources_name_no_folder_of_the_machine() -> None:
    model = torchvision.models.resnet18(weights=None).eval()
    leaves = leaves_of(featx.trace(model, torch.rand(1, 3, 64, 64)))
    file, _, line = leaves["layer1.0.conv1"].source.partition(":")
    assert file == "torchvision/models/resnet.py"
    code = Path(torchvision.models.resnet.__file__).read_text().split("\n")[int(line) - 1]
    assert code.strip() == "out = self.conv1(x)"
    assert not any(leaf.source.startswith("/") for leaf in leaves.values())


def test_shapes_of_shape_propagation_and_of_other_tools() -> None:
    class Metadata(NamedTuple):
        shape: torch.Size
        dtype: torch.dtype

    traced = featx.symbolic_trace(Block())
    first, second, third, *_ = traced.graph.nodes
    first.meta["tensor_meta"] = Metadata(torch.Size([2, 4]), torch.float16)
    second.meta["val"] = torch.empty(3, 1, device="meta")
    third.meta["tensor_meta"] = (Metadata(torch.Size([]), torch.int64), [Metadata(torch.Size([5]), torch.int64)])
    leaves = leaves_of(traced)
    assert [(leaves[name].shape, leaves[name].dtype) for name in ("x", "linear", "act")] == [
        ("2×4", "float16"), ("3×1", "float32"), ("scalar, 5", "int64"),
    ]  # fmt: skip


@dataclasses.dataclass
class Cost:
    flops: int
    label: str = "not a number"


class Measured(NamedTuple):
    seconds: float


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (7, {"cost": 7}),
        ({"flops": 3, "exact": True, "unit": "s"}, {"flops": 3}),
        (Cost(5), {"flops": 5}),
        (Measured(0.5), {"seconds": 0.5}),
    ],
)
def test_costs_are_numbers_by_name(found: object, expected: dict[str, float]) -> None:
    traced = featx.symbolic_trace(Block())
    node = next(node for node in traced.graph.nodes if node.name == "linear")
    assert leaves_of(traced, cost={node: found})["linear"].costs == expected
    assert leaves_of(traced, cost={"linear": found})["linear"].costs == expected
    node.meta["cost"] = found
    assert leaves_of(traced)["linear"].costs == expected
    assert leaves_of(traced, cost={})["linear"].costs == {}


def test_cost_that_is_none_names_the_node() -> None:
    with pytest.raises(featx.ArgumentTypeError, match="cost of node 'linear' is a str"):
        featx.draw(featx.symbolic_trace(Block()), cost={"linear": "much"})


def test_new_node_has_no_qualified_name() -> None:
    traced = featx.symbolic_trace(Block())
    node = next(node for node in traced.graph.nodes if node.name == "act")
    with traced.graph.inserting_after(node):
        traced.graph.call_function(torch.neg, (node,))
    root = featx.draw(traced).root
    assert not leaf_at(root, "neg").has_qualified_name
    assert leaf_at(root, "act").has_qualified_name


def test_node_that_reads_what_comes_later_raises() -> None:
    traced = featx.symbolic_trace(Block())
    nodes = {node.name: node for node in traced.graph.nodes}
    nodes["linear"].args = (nodes["act"],)
    with pytest.raises(featx.GraphError, match="'linear' reads 'act'"):
        featx.draw(traced)


def test_weights_are_not_kept() -> None:
    """A drawing outlives the model."""
    traced = featx.symbolic_trace(Block())
    drawing = featx.draw(traced)
    for leaf in drawing.root.leaves():
        values = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
        assert not any(isinstance(value, (Tensor, nn.Module, featx.Node)) for value in values)


@dataclasses.dataclass
class Row:
    name: str
    flops: int


@dataclasses.dataclass
class Report:
    nodes: tuple[Row, ...]


def test_cost_may_be_a_report() -> None:
    leaves = leaves_of(featx.symbolic_trace(Block()), cost=Report((Row("linear", 32), Row("act", 8))))
    assert {name: leaf.costs for name, leaf in leaves.items() if leaf.costs} == {
        "linear": {"flops": 32}, "act": {"flops": 8}
    }  # fmt: skip


@pytest.mark.parametrize("cost", [3, Report(3), [1]])  # pyright: ignore[reportArgumentType]
def test_cost_that_is_neither_mapping_nor_report_is_refused(cost: object) -> None:
    with pytest.raises(featx.ArgumentTypeError, match="give numbers by node or name, or a report"):
        featx.draw(featx.symbolic_trace(Block()), cost=cost)
