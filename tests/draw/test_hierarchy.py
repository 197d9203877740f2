from __future__ import annotations

import itertools

import pytest
import torch
import torchvision
from drawn import Block, Twice, folder_at, leaf_at, outline
from torch import Tensor, nn

import featx
from featx.drawing.hierarchy import Folder


def test_folders_are_the_calls_of_modules() -> None:
    root = featx.draw(featx.symbolic_trace(Twice())).root
    block = ["linear", "act", "add"]
    again = ["linear_1", "act_1", "add_1"]
    assert outline(root) == [
        "x", ["block", block], ["block", again], "scale.mul", ["block", ["linear_2", "act_2", "add_2"]], "output",
    ]  # fmt: skip
    assert [folder.call for folder in root.folders()] == [1, 1, 2, 3]


@pytest.mark.slow
def test_every_leaf_module_is_in_the_folder_of_its_parent() -> None:
    model = torchvision.models.resnet50(weights=None).eval()
    root = featx.draw(featx.trace(model, torch.rand(1, 3, 64, 64))).root
    paths = {name for name, module in model.named_modules() if list(module.children())}
    assert {folder.path for folder in root.folders()} == paths
    for folder in root.folders():
        for child in folder.children:
            if isinstance(child, Folder) and not child.type_name:
                continue  # a row has the path of the module around it
            name = child.path if isinstance(child, Folder) else child.name
            assert name == (f"{folder.path}.{child.label}" if folder.path else child.label)
            assert name.rpartition(".")[0] == folder.path


@pytest.mark.slow
def test_folders_read_only_from_what_stands_ahead_of_them() -> None:
    """So the folded graph has no cycle, whatever is folded."""
    model = torchvision.models.googlenet(weights=None, init_weights=False).eval()
    root = featx.draw(featx.trace(model, torch.rand(1, 3, 64, 64))).root
    indices = [leaf.index for leaf in root.leaves()]
    assert indices == list(range(len(indices)))
    for folder in root.folders():
        inside = [leaf.index for leaf in folder.leaves()]
        assert inside == list(range(inside[0], inside[0] + len(inside)))


@pytest.mark.slow
def test_equal_blocks_in_a_row_are_one_folder() -> None:
    model = torchvision.models.vit_b_16(weights=None).eval()
    root = featx.draw(featx.trace(model, torch.rand(1, 3, 224, 224))).root
    layers = folder_at(root, "encoder.layers")
    assert layers.row == "12 × EncoderBlock"
    assert [child.label for child in layers.children] == [f"encoder_layer_{number}" for number in range(12)]


class Stack(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.first, self.blocks = Block(widths[0]), nn.ModuleList([Block(width) for width in widths])
        self.joins = nn.ModuleList([nn.Linear(*pair) for pair in itertools.pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number < len(self.joins):
                x = self.joins[number](x)
        return x


def rows(root: Folder) -> list[tuple[str, str]]:
    return [(folder.label, folder.row) for folder in root.folders() if not folder.type_name]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        # The first block is equal too, but no Linear stands between it and the next.
        ([4] * 5, [("blocks.0 … 3", "4 × Block + Linear")]),
        ([4, 4], []),
        # A block of another width is another block.
        ([4, 4, 4, 8, 8, 8], []),
        ([4, 4, 4, 4, 8, 8], [("blocks.0 … 2", "3 × Block + Linear")]),
    ],
    ids=["five", "too few", "another width", "three and more"],
)
def test_rows_of_blocks_with_something_between_them(widths: list[int], expected: list[tuple[str, str]]) -> None:
    assert rows(featx.draw(featx.symbolic_trace(Stack(widths))).root) == expected


def test_module_with_a_single_operation_is_that_operation() -> None:
    root = featx.draw(featx.symbolic_trace(Twice())).root
    assert leaf_at(root, "scale.mul").label == "scale.mul"


def test_part_of_a_call_that_was_moved_away_is_a_second_folder() -> None:
    traced = featx.symbolic_trace(nn.Sequential(Block(), Block()))
    nodes = {node.name: node for node in traced.graph.nodes}
    with traced.graph.inserting_before(nodes["add_1"]):
        other = traced.graph.node_copy(nodes["_0_act"], lambda node: node)
        traced.graph.node_copy(nodes["_0_linear"], lambda node: node)
    traced.graph.lint()
    root = featx.draw(traced).root
    parts = [(folder.path, folder.call, folder.part) for folder in root.folders() if folder.path]
    assert parts == [("0", 1, 1), ("1", 1, 1), ("0", 1, 2)]
    assert other.name in {leaf.node_name for leaf in root.leaves()}


class Crowd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        for _ in range(100):
            x = x + 1
        return self.block(x)


def test_crowd_of_operations_between_modules_is_a_folder() -> None:
    root = featx.draw(featx.trace(Crowd(), torch.ones(1, 4))).root
    bundle = next(child for child in root.children if isinstance(child, Folder) and child.row)
    assert (bundle.label, bundle.row, len(bundle.children)) == ("test_hierarchy.py", "100 operations", 100)


def test_crowd_of_operations_alone_is_flat() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(1000):
            x = x + 1
        return x

    root = featx.draw(featx.symbolic_trace(chain)).root
    assert len(root.children) == 1002
