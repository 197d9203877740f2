"""Small inputs keep their values in a trace without values, so that code that goes by masks and boxes is followed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx

X = torch.rand(2, 600, 4)  # too large to keep its values
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
FULL = torch.ones(2, 3, dtype=torch.int64)


class Masked(nn.Module):
    """Has a layer, and `compute`, which gets the layer's output and a small input."""

    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 3), compute

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.compute(self.layer(x), mask)


def unless_all(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x if mask.bool().all() else x * mask[:, None]


def longest(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, : int(mask.sum(1).max())] * 2


def after_it_met_the_layer(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = x * mask[:, None]
    return x + 1 if mask.sum() > 3 else x - 1


def table_by_size(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(x.shape[1])
    return x + 1 if positions.float().mean() > 3 else x


def own_loop(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for column in mask.unbind(1):
        if column.any():
            x = x + column[:, None, None]
    return x


WITHOUT_VALUES = [unless_all, longest, after_it_met_the_layer, table_by_size, own_loop]


def runs_with_values(caplog: pytest.LogCaptureFixture) -> int:
    return sum(", with values: " in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("compute", WITHOUT_VALUES)
@pytest.mark.parametrize("mask", [MASK, FULL], ids=["padded", "full"])
def test_values_of_small_inputs_are_known_without_a_run_for_real(
    compute: Callable[..., torch.Tensor], mask: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model = Masked(compute).eval()
    with caplog.at_level(logging.DEBUG, logger="featx"):
        traced = featx.trace(model, X, mask)
    assert runs_with_values(caplog) == 0
    assert torch.equal(traced(X, mask), model(X, mask))
    disguise_as_larger = torch.rand(4, 700, 4), mask.repeat(2, 1)
    for args in [(X, MASK), (X, FULL), disguise_as_larger]:
        try:
            got = traced(*args)
        except featx.SpecializationError:
            continue
        assert torch.equal(got, model(*args))


def picked_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, mask[0].nonzero()[:, 0]].sum(1) + x[:, 0]


def written_by_the_layer(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.float()
    mask[0, 0] = x.sum()
    return x + 1 if mask.sum() > 1e9 else x - 1


def written_through_a_view(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.float()
    row = mask[0]
    mask.add_(x.mean())
    return x + 1 if row.sum() > 1e9 else x - 1


def drawn_into(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    noise = mask.float().uniform_()
    return x + 1 if noise.sum() > 1e9 else x - 1


@pytest.mark.parametrize("compute", [picked_rows, written_by_the_layer, written_through_a_view, drawn_into])
def test_values_that_large_inputs_or_draws_change_are_not_taken_for_known(
    compute: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = Masked(compute).eval()
    with caplog.at_level(logging.DEBUG, logger="featx"):
        traced = featx.trace(model, X, MASK)
    assert runs_with_values(caplog) > 0
    torch.manual_seed(0)
    expected = model(X, MASK)
    torch.manual_seed(0)
    assert torch.equal(traced(X, MASK), expected)


def test_feature_that_is_a_small_input_written_later_is_what_it_was() -> None:
    def compute(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scaled = mask * 2.0
        y = x * scaled[:, None]
        scaled.add_(y.mean())
        return y + scaled[:, None]

    model = Masked(compute).eval()
    extractor = featx.create_feature_extractor(model, ["mul", "add"], example_inputs=(X, MASK))
    got = extractor(X, MASK)
    assert torch.equal(got["mul"], MASK * 2.0)
    assert torch.equal(got["add"], model(X, MASK))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return x.reshape(x.shape[0], -1, x.shape[3])


@pytest.mark.parametrize(
    ("check_sizes", "allowed"),
    [("full", [(5, 16, 16), (2, 24, 32)]), ("batch", [(5, 16, 16)]), ("none", list[Any]())],
)
def test_check_sizes_says_which_lengths_are_tried(check_sizes: Any, allowed: list[Any]) -> None:
    model = Square()
    extractor = featx.create_feature_extractor(
        model, ["reshape"], example_inputs=torch.rand(2, 3, 16, 16), check_sizes=check_sizes
    )
    for batch, height, width in [(2, 16, 16), (5, 16, 16), (2, 24, 32)]:
        x = torch.rand(batch, 3, height, width)
        if (batch, height, width) in [(2, 16, 16), *allowed]:
            assert torch.equal(extractor(x)["reshape"], model(x))
        else:
            with pytest.raises(featx.SpecializationError, match="check_sizes"):
                extractor(x)


def test_check_sizes_of_another_name_is_refused() -> None:
    with pytest.raises(featx.ArgumentTypeError, match="'full', 'batch' or 'none'"):
        featx.create_feature_extractor(Square(), ["reshape"], check_sizes="some")  # type: ignore[call-overload]


class WritesSmall(nn.Module):
    """Has a weight, and writes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x * self.weight


class HoldsWriter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.writer, self.last = WritesSmall(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        return self.last(self.writer(x) + x)


def test_module_that_is_kept_whole_and_writes_a_small_value_is_seen_to() -> None:
    model, x = HoldsWriter().eval(), torch.rand(2, 3)
    extractor = featx.create_feature_extractor(
        model, ["add", "last"], example_inputs=x, tracer_kwargs={"leaf_modules": [WritesSmall]}
    )
    got = extractor(x)
    assert torch.equal(got["add"], x + 1)
    assert torch.equal(got["last"], model(x))


class Between(nn.Module):
    """Asks for a feature of a small value between two calls that may write it."""

    def __init__(self, change: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.seen, self.change = nn.Identity(), change
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        self.seen(x.view(-1))
        x = self.change(self, x)
        x += 1
        return x if (x == 1).any() else x * 2


def foreach(model: Any, x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([x], [model.weight.detach()])
    return x


WRITERS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "a draw in place": lambda model, x: nn.functional.dropout(x, 0.5, model.training, inplace=True),
    "a draw in place, by position": lambda model, x: nn.functional.dropout(x, 0.5, model.training, True),
    "a draw elsewhere": lambda model, x: nn.functional.dropout(x, 0.5, model.training),
    "a list in place": foreach,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_small_value_that_a_call_on_stand_ins_may_write(writer: str, training: bool) -> None:
    model, x = Between(WRITERS[writer]).train(training), torch.rand(2, 3)
    seen: list[torch.Tensor] = []
    extractor = featx.create_feature_extractor(model, ["seen", "add"], example_inputs=x, suppress_diff_warning=True)
    extractor.train(training)
    model.seen.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    torch.manual_seed(0)
    model(x)
    torch.manual_seed(0)
    assert torch.equal(extractor(x)["seen"], seen[-1])


@pytest.mark.parametrize("inplace", [True, False])
def test_layer_that_gives_its_input_in_eval_mode_gives_its_memory(inplace: bool) -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5, inplace)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            for _ in range(3):
                self.dropout(x)
                x += 1
            return x

    model, x = Grows().eval(), torch.rand(2, 3)
    names = ["dropout", "dropout_1", "dropout_2"]
    train_names = {"dropout": "dropout"}
    extractor = featx.create_feature_extractor(
        model, train_return_nodes=train_names, eval_return_nodes=names, example_inputs=x, suppress_diff_warning=True
    )
    got = extractor.eval()(x)
    for count, name in enumerate(names):
        assert torch.equal(got[name], sum([1] * count, x * 1))


@pytest.mark.parametrize("is_real", [True, False])
def test_what_a_write_returns_is_the_tensor_that_was_written(is_real: bool) -> None:
    def count(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if is_real and not x.isfinite().all():
            return x
        counts = torch.zeros(2, 3)  # keeps its values up to the write
        counts.scatter_add_(1, x[:, 0].argsort(), torch.ones(2, 3))
        return counts * 2

    model = Masked(count).eval()
    graph_module = featx.trace(model, X, MASK)
    assert torch.equal(graph_module(X, MASK), model(X, MASK))
    (written,) = graph_module.graph.find_nodes(op="call_method", target="scatter_add_")
    assert [user.name for user in written.users] == ["mul"]


def test_tensors_whose_values_are_known_are_lengths(caplog: pytest.LogCaptureFixture) -> None:
    class Splits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            x = self.layer(x)
            parts = x.split([height * width for height, width in sizes])
            return torch.stack([part.mean(0) for part in parts]), x.narrow(0, sizes[0, 0], 2), x.view(sizes[0, 1], -1)

    model = Splits().eval()
    with caplog.at_level(logging.DEBUG, logger="featx"):
        extractor = featx.create_feature_extractor(
            model, ["output"], example_inputs=(torch.rand(1200, 4), torch.tensor([[20, 30], [20, 30]]))
        )
    assert runs_with_values(caplog) == 0
    for count, sizes in ((1200, [[10, 40], [40, 20]]), (2400, [[20, 60], [30, 40]])):
        x, others = torch.rand(count, 4), torch.tensor(sizes)
        assert all(map(torch.equal, extractor(x, others)["output"], model(x, others)))
