"""optimize on a GPU: CUDA graphs, errors, plans."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import timm
import torch
import torchvision

import featx
from featx.errors import OptimizationError
from featx.features.dual import DualGraphModule
from featx.optimization.measure import relative_errors
from featx.optimization.recipe import Recipe


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.rand(2, 3, 64, 64, device="cuda")


@pytest.fixture(scope="module")
def extractor(images: torch.Tensor) -> DualGraphModule:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4).eval().to("cuda")
    return featx.create_feature_extractor(model, ["blocks.1", "blocks.3"], example_inputs=images).eval()


def test_cuda_graphs_are_tried_and_results_stay(
    extractor: DualGraphModule, images: torch.Tensor, tmp_path: Path
) -> None:
    fast = featx.optimize(extractor, images, tolerance=2e-2, budget=90, progress=False)
    plan = fast.plan
    assert plan is not None
    assert "CUDA graphs" in {trial.recipe.compile for trial in plan.trials if not trial.problem}
    assert fast.recipe.compile is not None  # so small a model only waits for launches
    others = [torch.rand_like(images) for _ in range(4)]
    found = [fast(each) for each in others]
    for each, features in zip(others, found, strict=True):
        with torch.no_grad():
            errors = relative_errors(extractor(each), features)
        assert max(errors.values()) < 4e-2
    plan.save(tmp_path / "plan.json")
    again = featx.optimize(extractor, plan=tmp_path / "plan.json")
    assert max(relative_errors(found[0], again(others[0])).values()) < 1e-2
    with pytest.raises(OptimizationError, match="cuda"):
        featx.optimize(copy.deepcopy(extractor).to("cpu"), plan=tmp_path / "plan.json")
    loaded = pickle.loads(pickle.dumps(fast))
    assert max(relative_errors(found[0], loaded(others[0])).values()) < 1e-2


def test_tolerance_0_is_exact(extractor: DualGraphModule, images: torch.Tensor) -> None:
    fast = featx.optimize(extractor, images, tolerance=0, budget=30, progress=False)
    for _ in range(3):
        x = torch.rand_like(images)
        with torch.no_grad():
            expected = extractor(x)
        assert all(torch.equal(expected[key], value) for key, value in fast(x).items())


def test_other_batches_after_it(images: torch.Tensor) -> None:
    model = torchvision.models.resnet18(weights=None).eval().to("cuda")
    extractor = featx.create_feature_extractor(model, {"layer3": "C4"}, example_inputs=images).eval()
    fast = featx.optimize(extractor, images, tolerance=2e-2, budget=30, progress=False)
    assert fast.recipe != Recipe()
    for size in (1, 3, 5):
        x = torch.rand(size, 3, 64, 64, device="cuda")
        with torch.no_grad():
            errors = relative_errors(extractor(x), fast(x))
        assert max(errors.values()) < 4e-2
