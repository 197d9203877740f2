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


def test_sides_that_a_module_kept_whole_asserts_are_not_tried_together(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = WantsSides(LENGTHS["shape"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.patches(x) / x.shape[0]

    x = torch.rand(2, 3, 8, 8)
    with caplog.at_level(logging.DEBUG, logger="featx"):
        featx.create_feature_extractor(Scaled().eval(), ["output"], example_inputs=x)
    # At first together, and then each at twice and at half of its length.
    tried = [record.getMessage() for record in caplog.records if "8 as" in record.getMessage()]
    assert len(tried) == 5


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_what_the_model_raises_at_other_lengths_is_told(error: type[Exception]) -> None:
    class OneWidth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 8:
                raise error(f"only 8 at {hex(id(self))}\nand more")
            return self.conv(x)

    extractor = featx.create_feature_extractor(OneWidth().eval(), ["output"], example_inputs=torch.rand(1, 3, 8, 8))
    with pytest.raises(featx.SpecializationError) as caught:
        extractor(torch.rand(1, 3, 8, 9))
    because = (
        f"a run at another length has failed because the model raises an error ({error.__name__}: only 8 at 0x...)"
    )
    assert because in str(caught.value)
    assert "helps only if the model takes the length of this input" in str(caught.value)


def test_what_a_layer_raises_at_other_lengths_is_told() -> None:
    class OneSize(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0], 2400) * 2

    extractor = featx.create_feature_extractor(OneSize().eval(), ["output"], example_inputs=torch.rand(1, 3, 800))
    expected = r"a run at another length has failed \(RuntimeError: shape '\[1, 2400\]' is invalid for input of size"
    with pytest.raises(featx.SpecializationError, match=expected):
        extractor(torch.rand(1, 3, 900))
