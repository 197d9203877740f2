"""Dimensions of which forward says that they have one length: no further run asks for others."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import featx

LENGTHS: dict[str, Callable[[torch.Tensor], tuple[int, int]]] = {
    "shape": lambda x: (x.shape[2], x.shape[3]),
    "from the end": lambda x: (x.shape[-2], x.shape[-1]),
    "size": lambda x: (x.size(2), x.size(-1)),
    "size()": lambda x: (x.size()[2], x.size()[3]),
    "unpacked": lambda x: tuple(x.shape)[2:],  # type: ignore[return-value]
}


class WantsSides(nn.Module):
    def __init__(self, lengths: Callable[[torch.Tensor], tuple[int, int]], *, is_loose: bool = False) -> None:
        super().__init__()
        self.conv, self.lengths, self.is_loose = nn.Conv2d(3, 4, 3), lengths, is_loose

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = self.lengths(x)
        if self.is_loose:
            return self.conv(x) * (2 if height == 8 else 3)
        torch._assert(height == 8, "height")
        assert 8 == width  # noqa: SIM300
        return self.conv(x).reshape(x.shape[0], -1)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_length_that_forward_compares_is_tried_once(lengths: str, caplog: pytest.LogCaptureFixture) -> None:
    model = WantsSides(LENGTHS[lengths]).eval()
    with caplog.at_level(logging.DEBUG, logger="featx"):
        extractor = featx.create_feature_extractor(model, ["conv", "reshape"], example_inputs=torch.rand(2, 3, 8, 8))
    tried = [record.getMessage() for record in caplog.records if " as " in record.getMessage()]
    assert len([line for line in tried if "8 as" in line]) == 1
    fixed = "fixed: the model takes no other length (AssertionError)"
    assert extractor.free_dims.of["x"][2:] == [fixed, fixed]
    x = torch.rand(5, 3, 8, 8)
    assert torch.equal(extractor(x)["reshape"], model(x))
    for shape in ((2, 3, 8, 16), (2, 3, 4, 8)):
        with pytest.raises(featx.SpecializationError, match="takes no other length"):
            extractor(torch.rand(shape))


def test_a_length_by_which_forward_branches_is_fixed_and_the_other_one_free() -> None:
    model = WantsSides(LENGTHS["shape"], is_loose=True).eval()
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=torch.rand(2, 3, 8, 8))
    assert extractor.free_dims.of["x"][0] == extractor.free_dims.of["x"][3] == "free"
    assert extractor.free_dims.of["x"][2].startswith("fixed: the model runs other operations")
    x = torch.rand(3, 3, 8, 16)
    assert torch.equal(extractor(x)["mul"], model(x))
    with pytest.raises(featx.SpecializationError, match="runs other operations"):
        extractor(torch.rand(2, 3, 16, 8))
