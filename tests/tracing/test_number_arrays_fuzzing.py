"""Random code on `np.array(x.shape)`: for each size an extractor computes what the model does, or refuses it."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import featx

EXAMPLE = (2, 12, 9)
SHAPES = (EXAMPLE, (1, 12, 9), (2, 16, 9), (2, 12, 7), (2, 5, 3), (2, 24, 24), (2, 13, 8), (2, 1, 1), (4, 40, 2))
ARRAYS = (
    "np.array(x.shape)", "np.asarray(x.shape[1:])", "np.array([x.shape[1], x.shape[2]])", "np.array(x.size())",
    "np.array([x.shape[:2], x.shape[1:]])", "np.array([x.shape[1] / 2, x.shape[2] / 3])", "np.array([x.shape[1], 4])",
)  # fmt: skip
STEPS = (
    "a = a + K", "a = K - a", "a = a * K", "a = a // K", "a = a % K", "a = a / K", "a = -a", "a = abs(a)", "a = a[1:]",
    "a = a[::-1]", "a = a[-1:]", "a = a.copy()", "a = a.astype(int)", "a = a.astype(float)", "a = np.ceil(a)",
    "a = np.floor(a / K)", "a = np.array(a.tolist())", "a = a + a", "a = a * x.shape[1]", "a = x.shape[2] + a",
    "a = a[a > K]", "a = np.where(a > K, a, K)", "a = np.maximum(a, K)", "a = np.sqrt(abs(a))", "a = np.round(a / 3)",
    "a = a.reshape(-1)", "a = np.concatenate([a.reshape(-1), [K]])", "a[...] = a + 1", "a += K", "a = a.T",
    "a = np.sort(a)", "a = a**2", "a = a.clip(0, K)", "a = a - a.min()", "a = np.array([*a.reshape(-1)])",
    "b = a; b[0] = K", "a = np.flip(a)", "a = a * np.array(2)", "a = a * np.float64(1.5)", "a = divmod(a, K)[1]",
    "a = a.view()", "a = np.atleast_1d(a.squeeze())", "a = a if len(a) > 1 else a + 1",
)  # fmt: skip
USES = (
    "x * float(a.sum())", "x * float(np.sum(a.tolist()))", "x * 2 if (a > K).any() else x", "x * 2 if K in a else x",
    "x * 2 if (a % K).all() else x", "x * float(a.reshape(-1)[0])", "x * float(max(a.reshape(-1)))", "x * len(a)",
    "x + torch.tensor(a).float().sum()", "x * 2 if np.any(a == K) else x", "x * float(np.prod(a))",
    "x + sum(int(each) for each in a.reshape(-1))", "x * 2 if a.mean() > K else x",
    "x[:, : abs(int(a.reshape(-1)[0])) % 5 + 1]", "x + torch.from_numpy(np.ascontiguousarray(a)).sum()",
)  # fmt: skip


def model_of(seed: int, folder: Path) -> Any:
    """Return a model of random code, which is in a file, so that its source can be read."""
    draw = random.Random(seed)
    steps = [draw.choice(STEPS) for _ in range(draw.randint(0, 5))]
    lines = ["x = x * 1.0", f"a = {draw.choice(ARRAYS)}", *steps, f"return {draw.choice(USES)}"]
    lines = [line.replace("K", str(draw.choice((1, 2, 3, 4, 5, 8, 12, 16)))) for line in lines]
    file = folder / f"numbers_{seed}.py"
    head = "import numpy as np\nimport torch\n\n\nclass Model(torch.nn.Module):\n"
    file.write_text(head + "    def forward(self, x):\n        " + "\n        ".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module.Model().eval()


@pytest.mark.fuzzing
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_code_on_arrays_of_sizes_is_right_or_refused(first_seed: int, tmp_path: Path) -> None:
    compared = 0
    for seed in range(first_seed, first_seed + 20):
        model = model_of(seed, tmp_path)
        try:
            model(torch.rand(EXAMPLE))
        except Exception:  # the code makes no sense, such as an item of an empty array
            continue
        extractor = featx.create_feature_extractor(
            model, ["output"], example_inputs=torch.rand(EXAMPLE), adaptive=False
        ).eval()
        for shape in SHAPES:
            x = torch.rand(shape)
            try:
                found = extractor(x)["output"]
            except (featx.SpecializationError, ArithmeticError, ValueError):
                assert shape != EXAMPLE
                continue
            assert torch.equal(found.nan_to_num(), model(x).nan_to_num()), (seed, shape)
            compared += 1
    assert compared > 40
