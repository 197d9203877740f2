"""The deployment example: each way out gives what the eager model gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import mobilenet_v3_small

import featx

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.onnx, onnxscript and inductor

PATH = Path(__file__).parents[2] / "examples" / "deploy.py"


@pytest.fixture(scope="module")
def example() -> Any:
    specification = importlib.util.spec_from_file_location("example_deploy", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_each_way_out_gives_what_the_model_gives(example: Any, tmp_path: Path) -> None:
    model = mobilenet_v3_small(weights=None).eval()
    images, others = torch.rand(2, 3, 64, 64), torch.rand(3, 3, 64, 64)
    extractor = featx.create_feature_extractor(model, {"features.3": "C3", "output": "logits"}, example_inputs=images)
    with torch.no_grad():
        expected = {"C3": model.features[:4](others), "logits": model(others)}
        ways = example.ways(extractor, images, tmp_path, "aot_eager")
        assert len(ways) == 4
        for way in ways.values():
            if isinstance(way, str):
                assert way.startswith("pip install onnx")
                continue
            found = way(others)
            assert list(found) == list(expected)
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def test_difference_is_relative_to_the_largest_value(example: Any) -> None:
    expected = {"a": torch.tensor([2.0, -4.0])}
    assert example.largest_difference({"a": torch.tensor([2.0, -3.0])}, expected) == 0.25
    with pytest.raises(ValueError, match="keys"):
        example.largest_difference({"b": torch.zeros(2)}, expected)
