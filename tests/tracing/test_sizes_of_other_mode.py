"""Other sizes of models that run for real, in eval mode and in train mode."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.ops import MultiScaleRoIAlign

import featx


class Chosen(nn.Module):
    """Goes on with as many rows as have a sum that is not too small, for which a trace needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.after = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.before(x))
        count = int((h.sum(-1) > -1e9).sum())
        return self.after(h[:count] * count)


def runs_at_other_sizes(caplog: pytest.LogCaptureFixture, outcome: str) -> list[int]:
    """Return how many runs of each trace at other sizes had this outcome, but for those that show them as zero."""
    runs: list[int] = []
    for record in caplog.records:
        text = record.getMessage()
        if "run 1, " in text:
            runs.append(0)
        if "other sizes" in text and "shown as" not in text and outcome in text:
            runs[-1] += 1
    return runs


def real_runs_at_other_sizes(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return how many runs with values each trace has made at other sizes."""
    runs: list[int] = []
    for record in caplog.records:
        text = record.getMessage()
        if "run 1, " in text:
            runs.append(0)
        if ", with values: other sizes" in text:
            runs[-1] += 1
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_both_modes_take_other_sizes(training: bool) -> None:
    model = Chosen()
    extractor = featx.create_feature_extractor(model, ["after"], example_inputs=torch.rand(5, 4), adaptive=False)
    for rows in (5, 9, 2):
        x = torch.rand(rows, 4)
        torch.manual_seed(0)
        expected = model.train(training)(x)
        torch.manual_seed(0)
        torch.testing.assert_close(extractor.train(training)(x)["after"], expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_detection_model_runs_for_real_at_other_sizes_in_eval_mode_alone(caplog: pytest.LogCaptureFixture) -> None:
    backbone: Any = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8, padding=1), nn.ReLU())
    backbone.out_channels = 8
    anchors = detection.rpn.AnchorGenerator(((16, 32),), ((1.0,),))
    model = detection.FasterRCNN(
        backbone, num_classes=3, min_size=64, max_size=96, rpn_anchor_generator=anchors,
        box_roi_pool=MultiScaleRoIAlign(["0"], 7, 2),
    ).eval()  # fmt: skip
    with caplog.at_level(logging.DEBUG, logger="featx"):
        featx.create_feature_extractor(model, ["roi_heads"], suppress_diff_warning=True)
    in_train, in_eval = real_runs_at_other_sizes(caplog)
    assert in_train == 0
    assert in_eval > 0


def test_what_the_other_mode_refused_is_tried_apart_from_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: Tensor, pair: Tensor) -> Tensor:  # of one length by chance
            first, second = pair
            x = nn.functional.dropout(self.layer(x), 0.5, self.training)
            return x.reshape(x.shape[0], -1, 3) * first + second

    with caplog.at_level(logging.DEBUG, logger="featx"):
        extractor = featx.create_feature_extractor(
            Mixes(), ["output"], example_inputs=(torch.rand(2, 4), torch.rand(2, 3)), adaptive=False
        )
    assert str(extractor.eval().free_dims).startswith("x: free, ")
    assert "pair: fixed" in str(extractor.free_dims)
    runs = runs_at_other_sizes(caplog, "done") + runs_at_other_sizes(caplog, "ended with ValueError")
    # First both at once, each of them, and the refused one at three times the length; then those that were refused, the
    # first dimension of them alone, and the other one.
    assert runs == [1, 1] + [3, 2]


@pytest.mark.parametrize("is_long", [True, False])
def test_runs_for_real_that_fail_come_to_an_end(
    is_long: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            h = self.layer(x)
            count = int((h.sum(-1) > -1e9).sum())
            for length, other in enumerate(others, 3):
                if other.shape != (length, length + 5):
                    raise ValueError("they do not fit")
            return h[:count] * count

    if is_long:  # so that twice what the first run has computed is enough
        monkeypatch.setattr("featx.tracing.sizes.size_runs._FEWEST_ELEMENTS", 1)
    inputs = (torch.rand(2, 4), *(torch.rand(length, length + 5) for length in range(3, 7)))
    model = Fits().eval()
    with caplog.at_level(logging.DEBUG, logger="featx"):
        traced = featx.trace(model, *inputs)
    assert torch.equal(traced(*inputs), model(*inputs))
    runs = real_runs_at_other_sizes(caplog)[0]
    assert runs <= 3 if is_long else runs > 9  # two dimensions of each of five inputs
    dims = traced.meta["free_dims"].of["others[3]"]
    assert all("such runs have failed before" in text for text in dims) is is_long


def test_a_free_batch_is_not_lost_by_what_other_lengths_have_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            h = self.layer(x)
            count = int((h.sum(-1) > -1e9).sum())
            if count != x.shape[0] or other.shape != (3, 8):  # without values the count is that of the example
                raise ValueError("not all of them")
            return h[:count] * count

    monkeypatch.setattr("featx.tracing.sizes.size_runs._FEWEST_ELEMENTS", 1)
    inputs = torch.rand(2, 4), torch.rand(3, 8)
    model = Counts().eval()
    traced = featx.trace(model, *inputs)
    assert traced.meta["free_dims"].of["x"][0] == "free"
    batch = torch.rand(7, 4), inputs[1]
    assert torch.equal(traced(*batch), model(*batch))


def test_a_run_for_real_at_other_sizes_of_one_image_takes_not_much_longer(caplog: pytest.LogCaptureFixture) -> None:
    class Bright(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            count = int((h.mean((1, 2, 3)) > -1e9).sum())
            if count != x.shape[0]:  # so it is without values, where the count is that of the example
                raise ValueError("not all of them")
            return h[:count]

    with caplog.at_level(logging.DEBUG, logger="featx"):
        featx.create_feature_extractor(Bright().eval(), ["output"], example_inputs=torch.rand(1, 3, 64, 64))
    tried = [text for text in caplog.messages if ", with values: other sizes" in text]
    assert tried
    for text in tried:
        growth = [int(now) / int(before) for before, now in re.findall(r"(\d+) as (\d+) at", text)]
        assert math.prod(growth) < 5  # 36 where each side is three or four times as long


class Asks(nn.Module):
    """Asks for its mode, does the same in both, and takes other lengths of its first dimension alone."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.linear, self.conv, self.drops = nn.Linear(4, 4), nn.Conv1d(6, 2, 1), drops

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2] == 4
        return nn.functional.dropout(self.conv(self.linear(x)), 0.5, self.training and self.drops).view(x.shape[0], -1)


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True])
def test_a_trace_is_for_both_modes_where_the_model_does_the_same(drops: bool) -> None:
    model, x = Asks(drops).eval(), torch.rand(3, 6, 4)
    traced = featx.trace(model, x)
    for given in (x, x[:1], torch.rand(5, 6, 4)):
        assert torch.equal(traced(given), model(given))
    model.train()
    traced.train()
    if drops:
        with pytest.raises(featx.SpecializationError, match="a model has a graph for each mode"):
            traced(x)
    else:
        assert torch.equal(traced(x), model(x))
    with pytest.raises(featx.SpecializationError, match=r"dimension 2 of input .x. is fixed"):
        featx.trace(model, x)(torch.rand(3, 6, 8))


class GhostBatchNorm(nn.Module):
    """Normalizes parts of at most four samples, as TabNet does; nine samples end with a part of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in x.split(4)])


def test_number_of_samples_that_train_mode_refuses_is_free_in_eval_mode() -> None:
    class Tabular(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = GhostBatchNorm(6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x.reshape(x.shape[0], -1)))

    model = Tabular().eval()
    extractor = featx.create_feature_extractor(model, ["head"], example_inputs=torch.rand(4, 2, 3), adaptive=False)
    assert extractor.free_dims is not None
    assert extractor.free_dims.of["x"][0] == "free"
    for samples in (9, 1, 8):
        x = torch.rand(samples, 2, 3)
        torch.testing.assert_close(extractor(x)["head"], model(x), rtol=0, atol=0)


class ShiftsFrames(nn.Module):
    """Moves some channels to the next frame, as TSM does; samples are the frames of videos of four frames."""

    def forward(self, x: Tensor) -> Tensor:
        videos = x.view(-1, 4, *x.shape[1:])
        return torch.cat([videos[..., :2].roll(1, 1), videos[..., 2:]], -1).view_as(x)


def test_number_of_samples_is_free_where_it_has_to_be_a_multiple() -> None:
    model = nn.Sequential(nn.Linear(3, 6), ShiftsFrames(), nn.Linear(6, 2)).eval()
    extractor = featx.create_feature_extractor(model, ["1.cat", "2"], example_inputs=torch.rand(8, 3), adaptive=False)
    assert extractor.free_dims is not None
    assert extractor.free_dims.of["input"][0] == "free, if the model takes that length"
    for samples in (4, 20):
        x = torch.rand(samples, 3)
        torch.testing.assert_close(extractor(x)["2"], model(x), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="invalid for input of size"):  # as the model
        extractor(torch.rand(6, 3))


class Frozen(nn.Module):
    """Keeps its batch norm in eval mode, as detectors and models that are fine-tuned do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("training", [False, True])
def test_modes_that_the_model_keeps_are_checked_where_the_graph_sets_them(training: bool) -> None:
    model, x = Frozen().train(training), torch.rand(5, 4)
    traced = featx.trace(model, x)
    for mode in (True, False):
        assert torch.equal(traced(x), model.train(mode)(x))
    mean = model.norm.running_mean.clone()  # type: ignore[union-attr]
    with pytest.raises(featx.SpecializationError, match=r"the train mode of 'norm' \(the model's own train\(\) leaves"):
        traced.train()(x)
    assert torch.equal(model.norm.running_mean, mean)  # type: ignore[arg-type]


class DropsTokens(nn.Module):
    """Keeps some of its tokens in train mode, as Perceiver does; their number is made of a length by C code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.latents = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            kept = int((1.0 - 0.2) * x.shape[1])
            order = torch.randn(x.shape[0], x.shape[1]).topk(kept, dim=1).indices
            x = x[torch.arange(x.shape[0])[:, None], order]
        queries = self.latents.expand(x.shape[0], -1, -1)
        return torch.einsum("bid,bjd->bij", queries, self.layer(x)).softmax(-1) @ x


def test_length_that_train_mode_alone_refuses_is_free_in_eval_mode() -> None:
    model = DropsTokens().eval()
    example = torch.rand(2, 10, 8)
    extractor = featx.create_feature_extractor(
        model, ["output"], example_inputs=example, adaptive=False, suppress_diff_warning=True
    )
    x = torch.rand(3, 17, 8)
    assert torch.equal(extractor(x)["output"], model(x))
    extractor.train()
    with pytest.raises(featx.SpecializationError):
        extractor(x)
