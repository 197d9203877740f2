"""What a run with values may not take for a constant: numbers that C code reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import featx


def asks_for_values(h: Tensor) -> Tensor:
    """Return counts, for which a kernel needs values."""
    return torch.bincount(h.argmax(-1).flatten(), minlength=4).float()


class DividesByTokens(nn.Module):
    """Adds a size to a float, which C code does, as the load balancing loss of Mixtral does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.layer(self.embed(ids)).flatten(0, -2)
        return asks_for_values(h) / (0.0 + h.shape[0])


class DividesByPixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).flatten(2).transpose(1, 2)
        return asks_for_values(h) * (1.0 / h.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, None])
@pytest.mark.parametrize("shape", [(1, 6), (1, 8), (2, 6), (3, 4), (1, 7), (1, 3, 8, 8), (2, 3, 6, 8)])
def test_a_product_of_sizes_is_no_constant(shape: tuple[int, ...], adaptive: bool | None) -> None:
    is_text = len(shape) == 2
    model = (DividesByTokens() if is_text else DividesByPixels()).eval()

    def batch_of(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(20, shape) if is_text else torch.rand(shape)

    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=batch_of(shape), adaptive=adaptive)
    others = [(1, 12), (2, 3), (3, 5)] if is_text else [(1, 3, 16, 16), (1, 3, 4, 16), (2, 3, 8, 12)]
    for other in (shape, *others, (4, *shape[1:]), (*shape[:-1], 2 * shape[-1])):
        batch = batch_of(other)
        try:
            found = extractor(batch)["output"]
        except featx.SpecializationError:
            assert other != shape
        else:
            torch.testing.assert_close(found, model(batch), rtol=0, atol=0)
