"""The quantization example: int8 layers, values close to the float model's, which stays as it was."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")  # torch announces where it moves its int8 layers
PATH = Path(__file__).parents[2] / "examples" / "quantize.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_quantize", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 7 * 7, 10),
    ).eval()  # fmt: skip


def test_int8_model_is_close_to_the_float_model_and_smaller(example: Any) -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [torch.randn(8, 3, 16, 16) for _ in range(3)]
    with torch.no_grad():
        int8 = example.quantize(model, batches)
        images = torch.randn(8, 3, 16, 16)
        found, expected = int8(images), model(images)
    assert example.signal_to_noise(expected, found) > 20
    assert not torch.equal(found, expected)
    assert example.size_of(int8) < 0.5 * example.size_of(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_that_follow_one_another_stay_in_8_bits(example: Any) -> None:
    with torch.no_grad():
        int8 = example.quantize(small(), [torch.randn(8, 3, 16, 16)])
    back = int8.graph.find_nodes(op="call_method", target="dequantize")
    # After the second relu, which Flatten reads in floats, and after the last layer.
    assert len(back) == 2
    quantizers = [node for node in int8.graph.nodes if node.op == "call_module" and node.target.endswith("_in")]
    assert len(quantizers) == 2


@pytest.mark.slow
def test_example_runs_on_its_photo(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["quantize.py", "--batches", "1", "--size", "64"])
    example.main()
    assert "layers in int8:   21" in capsys.readouterr().out
