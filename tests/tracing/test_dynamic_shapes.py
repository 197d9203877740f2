"""Models whose shapes depend on values: other sizes are tried without values, by lengths that one run has found."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import featx

# So many elements that a trace keeps no values of an input.
ROWS, WIDTH = 300, 32


class Masked(nn.Module):
    """Rows that a mask keeps: how many are left depends on values."""

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.keep = keep
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.keep(x)
        return self.head(kept) * (1 / max(kept.shape[0], 1))


def _by_mask(x: torch.Tensor) -> torch.Tensor:
    return x[x.mean(1) > 0]


def _by_positions(x: torch.Tensor) -> torch.Tensor:
    (rows,) = torch.where(x.mean(1) > 0)
    return x[rows]


def _by_selection(x: torch.Tensor) -> torch.Tensor:
    return x.masked_select((x.mean(1) > 0)[:, None]).view(-1, WIDTH)


def _by_order_of_distinct(x: torch.Tensor) -> torch.Tensor:
    return functional.one_hot(torch.unique((x.sum(1) * 10).long()) % WIDTH, WIDTH).float()


KEEPS = [_by_mask, _by_positions, _by_selection, _by_order_of_distinct]


@pytest.fixture
def runs(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the log lines of the runs with values so far."""
    caplog.set_level(logging.DEBUG, logger="featx")
    return lambda: [message for message in caplog.messages if ", with values: " in message]


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS)
def test_other_sizes_need_no_run_with_values(keep: Callable[..., torch.Tensor], runs: Callable[[], list[str]]) -> None:
    torch.manual_seed(0)
    model = Masked(keep).eval()
    extractor = featx.create_feature_extractor(model, ["head"], example_inputs=torch.randn(ROWS, WIDTH))
    assert not [line for line in runs() if f"other sizes ({ROWS} as" in line]
    for rows in (17, 2 * ROWS):
        x = torch.randn(rows, WIDTH)
        assert torch.equal(extractor(x)["head"], model.head(keep(x)))


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS)
def test_a_constant_that_follows_from_a_length_is_checked(keep: Callable[..., torch.Tensor]) -> None:
    class Indexed(Masked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.keep(x)
            return self.head(kept) * [1.0, 2.0, 3.0][kept.shape[0] % 3]

    torch.manual_seed(0)
    model = Indexed(keep).eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=torch.randn(ROWS, WIDTH))
    refused = 0
    for _ in range(8):
        x = torch.randn(ROWS, WIDTH)
        try:
            found = extractor(x)["output"]
        except featx.SpecializationError:
            refused += 1
            continue
        assert torch.equal(found, model(x))
    assert refused  # eight inputs do not keep equally many rows


@pytest.mark.slow
def test_masks_of_inputs_that_keep_their_values() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.head(x[mask]) + x[x.mean(2) > 0].sum()

    torch.manual_seed(0)
    model = Padded().eval()
    x, mask = torch.randn(8, 20, WIDTH), torch.rand(8, 20) > 0.5
    extractor = featx.create_feature_extractor(model, ["head"], example_inputs=(x, mask))
    x, mask = torch.randn(3, 9, WIDTH), torch.rand(3, 9) > 0.2
    assert torch.equal(extractor(x, mask)["head"], model.head(x[mask]))


class Selects(nn.Module):
    """Computes for real, because a number decides; `keep` is a layer that keeps what it has computed."""

    def __init__(self, keep: nn.Module) -> None:
        super().__init__()
        self.keep = keep
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.keep(x)
        return self.head(kept) if kept.sum().item() > -1e9 else kept


class KeepsTable(nn.Module):
    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.ones(x.shape[1])
        return x[x.mean(1) > 0] * self.table


class Counts(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x[x.mean(1) > 0]


class ReadsCalls(Selects):
    """Does something else in every second call, by a count that a layer keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if self.keep.calls % 2 else 0.5)


@pytest.mark.slow
def test_second_call_of_a_model_that_runs_for_real_needs_no_values(runs: Callable[[], list[str]]) -> None:
    model, x = Selects(KeepsTable()).eval(), torch.randn(ROWS, WIDTH)
    extractor = featx.create_feature_extractor(model, ["head"], example_inputs=x, check_sizes="none")
    assert [run for run in runs() if "second call" in run or "first call" in run] == []
    assert torch.equal(extractor(x)["head"], model(x))


@pytest.mark.slow
def test_state_of_a_model_that_runs_for_real_is_found() -> None:
    with pytest.raises(featx.TraceError):
        featx.trace(ReadsCalls(Counts()).eval(), torch.randn(ROWS, WIDTH))


def lengths_by_method(mask: torch.Tensor) -> int:
    return mask.nonzero().size(0)


def lengths_of_parts(mask: torch.Tensor) -> int:
    return torch.where(mask > 0)[0].numel()


def lengths_by_mask(mask: torch.Tensor) -> int:
    return (2 * mask[mask > 0]).shape[0]


def lengths_repeated(mask: torch.Tensor) -> int:
    return torch.arange(len(mask)).repeat_interleave(mask.long()).numel()


class DecidesByBuffer(nn.Module):
    """Takes another layer where a buffer has other values: of how many there are, code asks a length."""

    def __init__(self, length: Callable[[torch.Tensor], int], rows: int) -> None:
        super().__init__()
        self.length = length
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("mask", torch.zeros(rows))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0 if self.length(self.get_buffer("mask")) > 2 else 1](x)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [4, 5000])
@pytest.mark.parametrize("length", [lengths_by_method, lengths_of_parts, lengths_by_mask, lengths_repeated])
def test_length_that_follows_from_values_of_a_buffer_is_a_decision(
    length: Callable[[torch.Tensor], int], rows: int
) -> None:
    model, x = DecidesByBuffer(length, rows).eval(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=x)
    adaptive = featx.create_feature_extractor(model, ["output"], example_inputs=x, adaptive=True)
    assert torch.equal(extractor(x)["output"], model(x))
    model.get_buffer("mask").fill_(1)
    with pytest.raises(featx.SpecializationError):
        extractor(x)
    assert torch.equal(adaptive(x)["output"], model(x))
    with pytest.raises(featx.TraceError):
        featx.symbolic_trace(model)


class UsesItemsOfBuffer(DecidesByBuffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.get_buffer("mask")
        return self.layers[0](x) + mask[mask > 0].sum()


@pytest.mark.parametrize("tracer", ["example", "symbolic"])
def test_items_of_a_buffer_may_become_more_where_no_code_asks_how_many(tracer: str) -> None:
    model, x = UsesItemsOfBuffer(lengths_by_mask, 4).eval(), torch.rand(2, 4)
    graph = featx.trace(model, x) if tracer == "example" else featx.symbolic_trace(model)
    model.get_buffer("mask").copy_(torch.tensor([1, 0, 3, 1]))
    assert torch.equal(graph(x), model(x))
