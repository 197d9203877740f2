from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import torchvision
from drawn import Twice

import featx
from featx.drawing.folding import fold, visible
from featx.drawing.hierarchy import Folder, Item


def shown(root: Folder, opened: set[Folder]) -> list[Item]:
    """Return the boxes that are drawn."""
    found: list[Item] = []
    for item in visible(root, sizes=False):
        found += shown(item, opened) if isinstance(item, Folder) and item in opened else [item]
    return found


@pytest.fixture(scope="module")
def resnet() -> featx.GraphModule:
    return featx.trace(torchvision.models.resnet50(weights=None).eval(), torch.rand(1, 3, 64, 64))


@pytest.mark.slow
def test_first_view_of_a_resnet_is_its_stages(resnet: featx.GraphModule) -> None:
    root = featx.draw(resnet).root
    labels = [item.label for item in shown(root, fold(root, None, sizes=False))]
    assert labels == "x conv1 bn1 relu maxpool layer1 layer2 layer3 layer4 avgpool flatten fc output".split()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto"])
def test_first_view_fits_on_a_screen(name: str) -> None:
    model = timm.create_model(name, pretrained=False).eval()
    root = featx.draw(featx.trace(model, torch.rand(1, 3, 224, 224))).root
    assert 6 <= len(shown(root, fold(root, None, sizes=False))) <= 18


@pytest.mark.slow
def test_folder_with_most_of_the_model_is_opened_beside_others() -> None:
    model = torchvision.models.vit_b_16(weights=None).eval()
    root = featx.draw(featx.trace(model, torch.rand(1, 3, 224, 224))).root
    assert {folder.label for folder in fold(root, None, sizes=False)} == {"", "encoder"}


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 100])
def test_depth_counts_levels_of_modules(resnet: featx.GraphModule, depth: int) -> None:
    root = featx.draw(resnet).root
    opened = fold(root, depth, sizes=False)
    levels = {folder: 1 + folder.path.count(".") if folder.path else 0 for folder in root.folders()}
    assert {folder for folder in opened if folder.type_name} == {
        folder for folder, level in levels.items() if folder.type_name and level <= depth
    }


def test_what_is_around_a_highlighted_node_is_open(resnet: featx.GraphModule) -> None:
    drawing = featx.draw(resnet, depth=0, highlight=["layer2.3.conv2"])
    opened = {folder.label for folder in fold(drawing.root, 0, sizes=False)}
    assert opened == {"", "layer2", "1 … 3", "3"}


def test_small_graph_is_open(resnet: featx.GraphModule) -> None:
    root = featx.draw(featx.symbolic_trace(Twice())).root
    assert fold(root, None, sizes=False) == set(root.folders())


def test_minor_nodes_show_on_request() -> None:
    def function(x: Any) -> Any:
        return x.reshape(x.shape[0], -1)

    root = featx.draw(featx.trace(function, torch.ones(2, 3, 4))).root
    assert [item.label for item in visible(root, sizes=False)] == ["x", "reshape", "output"]
    with_sizes = ["x", "check_is_tensor", "check_rank", "getattr", "getitem", "reshape", "output"]
    assert [item.label for item in visible(root, sizes=True)] == with_sizes
