"""What forward does after the requested values decides nothing about them: it fixes no length, dtype or value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx


class Model(nn.Module):
    def __init__(self, behind: Callable[[Model, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 6 * 6, 2)
        self.behind = behind

    def forward(self, x: torch.Tensor) -> Any:
        if x.shape[-1] > 100:
            x = x[..., :100]
        return self.behind(self, x, self.norm(self.conv(x)))


BEHIND: dict[str, Callable[[Model, torch.Tensor, torch.Tensor], Any]] = {
    "loop over the batch": lambda model, x, y: [y[row] * 2 for row in range(x.shape[0])],
    "iteration": lambda model, x, y: [row * 2 for row in y],
    "branch": lambda model, x, y: y * 2 if y.shape[0] > 2 else y + 1,
    "batch of one": lambda model, x, y: y if x.shape[0] == 1 else y.expand(x.shape[0], -1, -1, -1),
    "head of one size": lambda model, x, y: model.head(y.flatten(1)),
    "assertion": lambda model, x, y: y if tuple(x.shape) == (2, 3, 8, 8) else 1 / 0,
    "dtype": lambda model, x, y: y * 2 if y.dtype == torch.float32 else y.float(),
    "value": lambda model, x, y: y[int((y.sum() > 1e9).item())],
    "format": lambda model, x, y: {f"row {row}": y[row] for row in range(len(y))},
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("behind", BEHIND)
def test_it_takes_what_the_model_takes_up_to_there(behind: str, rows: int) -> None:
    if behind == "assertion" and rows == 1:
        return
    model = Model(BEHIND[behind]).eval()
    extractor = featx.create_feature_extractor(
        model, ["conv", "norm"], example_inputs=torch.rand(rows, 3, 8, 8), suppress_diff_warning=True, adaptive=False
    )
    for shape in ((1, 3, 8, 8), (2, 3, 8, 8), (5, 3, 8, 8), (3, 3, 11, 20)):
        x = torch.rand(shape)
        found = extractor(x)
        conv = model.conv(x)
        assert torch.equal(found["conv"], conv)
        assert torch.equal(found["norm"], model.norm(conv))
    half = extractor.double()
    x = torch.rand(4, 3, 9, 9, dtype=torch.float64)
    assert torch.equal(half(x)["conv"], model.conv(x))


def test_what_is_ahead_of_them_still_counts() -> None:
    model = Model(BEHIND["iteration"]).eval()
    extractor = featx.create_feature_extractor(model, ["conv"], example_inputs=torch.rand(2, 3, 8, 8), adaptive=False)
    with pytest.raises(featx.SpecializationError, match="100"):
        extractor(torch.rand(2, 3, 8, 120))


def test_state_that_is_written_behind_them_still_counts() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            y = self.conv(x * self.scale)
            rows = [row.mean() for row in y]
            self.scale.add_(x.shape[0])
            return rows

    model, twin = Counts().eval(), Counts().eval()
    twin.load_state_dict(model.state_dict())
    extractor = featx.create_feature_extractor(model, ["conv"], example_inputs=torch.rand(2, 3, 8, 8), adaptive=False)
    for rows in (2, 2, 2):
        x = torch.rand(rows, 3, 8, 8)
        seen: list[torch.Tensor] = []
        handle = twin.conv.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        twin(x)
        handle.remove()
        assert torch.equal(extractor(x)["conv"], seen[0])
        assert torch.equal(model.scale, twin.scale)
