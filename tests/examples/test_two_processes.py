"""The distributed example: two processes end with the weights of one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="this torch has no gloo"
)

PATH = Path(__file__).parents[2] / "examples" / "distributed.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_distributed", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_frozen_part_gets_no_gradient_and_maps_are_those_of_the_model(example: Any) -> None:
    torch.manual_seed(0)
    classifier = example.Classifier()
    torch.manual_seed(0)
    model = example.resnet18(weights=None, num_classes=10).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        c3 = model.layer2(model.layer1(model.maxpool(model.relu(model.bn1(model.conv1(images))))))
        found = classifier.train().backbone(images)
        assert torch.equal(found["C3"], c3)
        assert torch.equal(found["C4"], model.layer3(c3))
    classifier(images).sum().backward()
    trained = {name for name, value in classifier.named_parameters() if value.grad is not None}
    assert {name.split(".")[1] for name in trained if name.startswith("backbone.")} == {"layer3"}
    assert {"head.weight", "head.bias"} <= trained


@pytest.mark.slow
def test_two_processes_end_with_the_weights_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PATH.parent)  # the processes import the example by its name
    example: Any = importlib.import_module("distributed")
    first, second = example.in_processes(seed=0, steps=2)
    torch.manual_seed(0)
    classifier = example.Classifier()
    example.train(classifier, 0, 1, 2)
    alone = classifier.state_dict()
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in alone)
    for name, value in alone.items():
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-4, atol=1e-6)
