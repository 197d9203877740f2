"""Cases of an extractor of which one leaves something on the model that others do not read, or that they read."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx


class Kept(nn.Module):
    """Stores something where a mask is given, and reads it in other calls where `reads` says so."""

    def __init__(self, keep: str, reads: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.keep, self.reads = keep, reads
        self.kept: Any = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if mask is not None:
            x = x * mask
            kept = {"size": x.shape[0], "text": "seen", "flag": True, "number": x.sum().item()}
            self.kept = kept[self.keep]
            return x
        if self.reads == "value" and self.kept is not None:
            return x * 2
        if self.reads == "form" and self.kept is not None and x.dim() > 2:  # never here
            return x + 1
        return x - 1


X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1.0], [0.0], [1.0]])
KINDS = ["text", "flag"]


def _adaptive(model: nn.Module, with_mask: bool) -> nn.Module:
    example = {"x": X, "mask": MASK} if with_mask else {"x": X}
    return featx.create_feature_extractor(model, ["output"], example_inputs=example, adaptive=True)


@pytest.mark.slow
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("reads", ["nothing", "form"])
@pytest.mark.parametrize("keep", KINDS)
def test_what_other_calls_do_not_depend_on_may_be_left(keep: str, reads: str, with_mask: bool) -> None:
    model = Kept(keep, reads).eval()
    extractor = _adaptive(model, with_mask)
    for mask in (None, MASK, None, MASK):
        expected = model(X, mask)
        out = extractor(X) if mask is None else extractor(X, mask)
        assert torch.equal(out["output"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("keep", [*KINDS, "size", "number"])
def test_what_other_calls_read_is_refused(keep: str, with_mask: bool) -> None:
    model = Kept(keep, "value").eval()
    without = model(X)
    model(X, MASK)
    assert not torch.equal(model(X), without)
    model.kept = None
    extractor = _adaptive(model, with_mask)
    with pytest.raises(featx.SpecializationError, match=r"stores what it computes in .*kept"):
        extractor(X) if with_mask else extractor(X, MASK)


class KeptTensor(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.reads = reads
        self.kept = torch.zeros(())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if mask is not None:
            self.kept = x.mean()
            return x * mask + self.kept
        if self.reads:
            return x - self.kept
        return x - 1


@pytest.mark.slow
@pytest.mark.parametrize("with_mask", [False, True])
def test_tensors_that_are_left(with_mask: bool) -> None:
    model = KeptTensor(reads=False).eval()
    extractor = _adaptive(model, with_mask)
    for mask in (None, MASK, None):
        out = extractor(X) if mask is None else extractor(X, mask)
        assert torch.equal(out["output"], model(X, mask))
    extractor = _adaptive(KeptTensor(reads=True).eval(), with_mask)
    with pytest.raises(featx.SpecializationError, match=r"stores what it computes in .*kept"):
        extractor(X) if with_mask else extractor(X, MASK)


class Settings(nn.Module):
    """Leaves a constant where a mask is given, in one of several ways, and reads it without one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.shift: Tensor | None = torch.ones(4)
        self.seen: set[int] = set()
        self.options = {"scale": 1.0}
        self.names = ["plain"]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            x = x if self.shift is None else x + self.shift
            return x * (1 + len(self.seen)) * self.options["scale"] * len(self.names[0])
        if self.way == "none":
            self.shift = None
        elif self.way == "set":
            self.seen.add(1)
        elif self.way == "other dict":
            self.options = {"scale": 2.0}
        elif self.way == "item":
            self.names[0] = "masked"
        return x * mask


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("way", ["none", "set", "other dict", "item"])
def test_constants_that_are_left_in_any_way(way: str, with_mask: bool) -> None:
    model = Settings(way).eval()
    without = model(X)
    model(X, MASK)
    assert not torch.equal(model(X), without)
    extractor = _adaptive(Settings(way).eval(), with_mask)
    with pytest.raises(featx.SpecializationError, match=r"stores what it computes in "):
        extractor(X) if with_mask else extractor(X, MASK)


def test_settings_of_each_mode_go_together() -> None:
    class OfMode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.scale = 2.0 if self.training else 3.0
            return x * self.scale

    model = OfMode().eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=X)
    assert torch.equal(extractor(X)["output"], X * 3)
    assert torch.equal(extractor.train()(X)["output"], X * 2)


def test_sizes_that_are_left_may_be_those_of_the_example_by_chance() -> None:
    class Sized(Kept):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.linear(x)
            if mask is not None:
                self.kept = x.shape[0]
                return x * mask
            return x * self.kept

    model = Sized("size", "value").eval()
    model.kept = 3  # as long as the example
    extractor = _adaptive(model, with_mask=False)
    with pytest.raises(featx.SpecializationError, match=r"stores what it computes in .*kept"):
        extractor(X, MASK)


@pytest.mark.slow
def test_class_of_labels_that_a_config_remembers() -> None:
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config).eval()
    ids = torch.tensor([[5, 7, 9, 4], [3, 8, 6, 2]])
    extractor = featx.create_feature_extractor(model, ["bert.encoder.layer.0", "output"])
    labels = torch.tensor([2, 0])
    loss = extractor(input_ids=ids, labels=labels)["output"].loss
    assert model.config.problem_type is None
    assert extractor(input_ids=ids)["output"].loss is None
    with pytest.raises(featx.SpecializationError, match="problem_type"):  # the model has decided by its first labels
        extractor(input_ids=ids, labels=torch.rand(2, 3))
    assert torch.equal(loss, model(input_ids=ids, labels=labels).loss)


class Anchors(nn.Module):
    """Keeps a table for the last size in eval mode, as detection heads do, and may read the size in train mode."""

    shape: Any = None
    size = 8  # that of the example
    table = torch.empty(0)

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.factors = torch.arange(99.0)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.training:
            return y + self.read(x)
        if self.shape != x.shape:
            self.table = torch.arange(x.shape[2], dtype=x.dtype)[:, None] + torch.arange(x.shape[3], dtype=x.dtype)
            self.shape, self.size = x.shape, x.shape[2]
        return y + self.table

    @property
    def offset(self) -> float:
        return 0.0 if self.shape is None else 1.0

    def read(self, x: Tensor) -> Any:
        if self.reads == "comparison":
            return 0.0 if self.shape is None or self.shape == x.shape else 1.0
        if self.reads == "argument":
            return torch.full((1,), self.size, dtype=x.dtype)
        if self.reads == "index":
            return self.factors[self.size]
        if self.reads == "key":
            return {8: 1.0}.get(self.size, 2.0)
        if self.reads == "truth":
            return 1.0 if self.size else 2.0
        if self.reads == "class":
            return 1.0 if isinstance(self.shape, tuple) else 2.0
        if self.reads == "text":
            return float(str(self.size) == "8")
        if self.reads == "error":
            try:
                return float(self.size + 1)
            except TypeError:
                return 9.0
        if self.reads == "property":
            return self.offset
        return self.table.sum() if self.reads == "table" else 0.0


READS = ["comparison", "argument", "index", "key", "truth", "table", "class", "text", "error", "property"]


class Detector(nn.Module):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 3, 3, 1, 1), Anchors(reads)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["nothing", *READS])
def test_size_that_eval_mode_keeps_is_no_obstacle_to_train_mode_where_nothing_reads_it(reads: str) -> None:
    model, x = Detector(reads).eval(), torch.rand(1, 3, 8, 8)
    names = ["head.conv", "output"]
    extractor = featx.create_feature_extractor(model, names, example_inputs=x, suppress_diff_warning=True)
    for size in (8, 12, 8):
        for training in (False, True):
            given = torch.rand(2, 3, size, size)
            expected = model.train(training)(given)
            if training and reads != "nothing":
                with pytest.raises(featx.TraceError):
                    extractor.train()(given)
            else:
                assert torch.equal(extractor.train(training)(given)["output"], expected)


class Warm(nn.Module):
    """Notes in its second call in eval mode that there was a first one."""

    is_warm = is_ready = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            return y * 2 if self.is_ready else y
        if self.is_warm:
            self.is_ready = True
        self.is_warm = True
        return y


@pytest.mark.slow
def test_half_of_one_sample_is_no_other_length(caplog: pytest.LogCaptureFixture) -> None:
    """A second call with one sample finds the table, and does not make it as a first call does."""
    model, x = Detector("nothing").eval(), torch.rand(1, 3, 8, 8)
    with caplog.at_level(logging.DEBUG, logger="featx"):
        featx.create_feature_extractor(model, ["output"], example_inputs=x, suppress_diff_warning=True)
    tried = [text for text in caplog.messages if "with empty caches" in text]
    assert any("(1 as 3 at 0)" in text for text in tried)
    assert not any("(1 as 1 at 0)" in text for text in tried)


class Asks(nn.Module):
    """Asks in train mode by its name for what eval mode has assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            return y * 2 if "rows" in vars(self) else y
        self.rows = x.shape[0]
        return y


class HasProperty(Asks):
    """Reads it in train mode by a property alone."""

    @property
    def factor(self) -> float:
        return 1.0 if self._rows is None else 2.0

    _rows: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            return y * self.factor
        self._rows = x.shape[0]
        return y


class Catches(Asks):
    """Goes on in train mode where the attribute is missing, which its class has too."""

    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            return y * self.factor()
        self.rows = x.shape[0]
        return y

    def factor(self) -> float:
        try:
            return 2.0 if self.rows else 1.0
        except AttributeError:
            return 1.0


def test_what_a_second_call_leaves_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="a later call may do something else"):
        featx.create_feature_extractor(Warm().eval(), ["output"], example_inputs=X)


@pytest.mark.parametrize("kind", [Asks, HasProperty, Catches])
def test_what_eval_mode_leaves_in_other_ways_is_read_in_train_mode(kind: type[nn.Module]) -> None:
    extractor = featx.create_feature_extractor(kind().eval(), ["output"], example_inputs=X)
    extractor(X)
    with pytest.raises(featx.TraceError, match="stores what it computes"):
        extractor.train()(X)
