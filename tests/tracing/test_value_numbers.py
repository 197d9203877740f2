"""Numbers that come from values, and that C code reads: a list is indexed, a list repeated."""

from __future__ import annotations

import array
import collections
import contextlib
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import featx

FIRST, THIRD, TWO = torch.eye(4)[:1], torch.eye(4)[2:3], torch.tensor([[1.0, 0, 1, 0]])


class Scaled(nn.Module):
    """Multiplies by what a list holds at a place that depends on the values of the input."""

    factors = (1.0, 2.0, 3.0, 4.0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def place(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factors[self.place(x)]


class ByItem(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return x[0].argmax().item()


class ByList(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return x.argmax(1).tolist()[0]


class ByLengthOfNonzero(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return x[0].nonzero().shape[0]


class ByLengthOfSelection(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return len(x[x > 0])


class ByCountOfSelection(Scaled):
    def place(self, x: torch.Tensor) -> Any:
        return torch.masked_select(x, x > 0).numel()


@pytest.mark.parametrize("kind", [ByItem, ByList, ByLengthOfNonzero, ByLengthOfSelection, ByCountOfSelection])
def test_number_that_c_code_reads_is_checked(kind: type[Scaled]) -> None:
    model = kind().eval()
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=FIRST, adaptive=False)
    refused = 0
    for x in (FIRST, FIRST * 2, THIRD, TWO):
        try:
            assert torch.equal(extractor(x)["mul"], model(x))
        except featx.SpecializationError:
            refused += 1
            assert model.place(x) != model.place(FIRST)
    assert refused


class ByModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[x[0].argmax().item()](x) + 1


def test_adaptive_extractor_takes_the_other_cases() -> None:
    model = ByModule().eval()
    extractor = featx.create_feature_extractor(model, ["add"], example_inputs=FIRST, adaptive=True)
    for x in (FIRST, THIRD, TWO):
        assert torch.equal(extractor(x)["add"], model(x))


class Followed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item() + x[x > 0].shape[0]


@pytest.mark.slow
def test_number_that_only_torch_reads_stays_free() -> None:
    extractor = featx.create_feature_extractor(Followed(), ["add"], example_inputs=FIRST)
    for x in (FIRST, THIRD * 3, TWO):
        assert torch.equal(extractor(x)["add"], Followed()(x))


class Grouped(nn.Module):
    """Multiplies by a number that depends on which labels are equal."""

    def __init__(self, count: Callable[[list[Any]], int]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count = count

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.count(labels.tolist())


class GroupedBySize(Grouped):
    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.count([other.shape[0] for other in others])


def largest(scores: list[Any]) -> int:
    """By an array of C, whose comparisons no trace sees."""
    return 1 + max(range(len(scores)), key=array.array("d", scores).__getitem__)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("example", [[0.9, 0.1, 0.2], [0.1, 0.9, 0.3], [0.6, 0.6, 0.6]])
def test_order_of_floats_that_c_code_compares_is_checked(example: list[float], adaptive: bool) -> None:
    model = Grouped(largest).eval()
    extractor = featx.create_feature_extractor(
        model, ["mul"], example_inputs=(FIRST, torch.tensor(example)), adaptive=adaptive
    )
    for scores in ([0.9, 0.1, 0.2], [0.1, 0.9, 0.3], [0.2, 0.1, 0.7]):
        expected = model(FIRST, torch.tensor(scores))
        try:
            found = extractor(FIRST, torch.tensor(scores))["mul"]
        except featx.SpecializationError:
            assert not adaptive
            assert scores != example
            continue
        assert torch.equal(found, expected)


def in_a_defaultdict(labels: list[Any]) -> int:
    groups = collections.defaultdict[Any, list[int]](list)
    for place, label in enumerate(labels):
        groups[label].append(place)
    return max(map(len, groups.values()))


def by_setdefault(labels: list[Any]) -> int:
    groups: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        groups.setdefault(label, []).append(place)
    return len(groups)


def by_get(labels: list[Any]) -> int:
    counts: dict[Any, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    return max(counts.values())


def by_membership(labels: list[Any]) -> int:
    counts: dict[Any, int] = {}
    for label in labels:
        if label not in counts:
            counts[label] = 0
        counts[label] += 1
    return max(counts.values())


def by_set(labels: list[Any]) -> int:
    return len(set(labels))


LABELS = [[1, 3, 2], [2, 2, 3], [3, 3, 3], [5, 6, 7]]


GROUPS: dict[Any, list[int]] = {}


def in_a_dict_that_is_cleared(labels: list[Any]) -> int:
    GROUPS.clear()
    for place, label in enumerate(labels):
        GROUPS.setdefault(label, []).append(place)
    return len(GROUPS)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("kind", [Grouped, GroupedBySize])
@pytest.mark.parametrize(
    "count", [in_a_dict_that_is_cleared, in_a_defaultdict, by_setdefault, by_get, by_membership, by_set]
)
def test_labels_that_are_equal_or_not_are_checked(
    count: Callable[[list[Any]], int], kind: type[Grouped], adaptive: bool
) -> None:
    model = kind(count).eval()
    cases = [
        [FIRST, torch.tensor(labels)] if kind is Grouped else [FIRST, *(torch.rand(label, 2) for label in labels)]
        for labels in LABELS
    ]
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=tuple(cases[0]), adaptive=adaptive)
    for inputs in cases:
        if adaptive or inputs is cases[0]:
            assert torch.equal(extractor(*inputs)["mul"], model(*inputs))
        elif model.count(case_of(inputs)) != model.count(case_of(cases[0])):
            with pytest.raises(featx.SpecializationError):
                extractor(*inputs)


def case_of(inputs: list[torch.Tensor]) -> list[Any]:
    return inputs[1].tolist() if len(inputs) == 2 else [each.shape[0] for each in inputs[1:]]


class Finite(nn.Module):
    """Goes another way where the mean is no number, as code that guards against that does."""

    def __init__(self, is_other: Callable[[float], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_other = is_other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.nan_to_num() * 2 if self.is_other(x.mean().item()) else y + 1


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "is_other",
    [
        math.isnan, lambda mean: not math.isfinite(mean), math.isinf, np.isnan, lambda mean: mean != mean,
        lambda mean: math.isclose(mean, 0.25),
        lambda mean: math.isclose(mean, 0.3, abs_tol=0.1), lambda mean: math.modf(mean)[0] == 0.25,
        lambda mean: math.frexp(mean)[0] == 0.5,
    ],
)  # fmt: skip
def test_what_math_answers_about_a_value_is_checked(
    is_other: Callable[[float], Any], value: float, adaptive: bool
) -> None:
    model = Finite(is_other).eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=FIRST, adaptive=adaptive)
    assert torch.equal(extractor(FIRST)["output"], model(FIRST))
    x = torch.full((1, 4), value)
    expected = model(x)
    if adaptive:
        torch.testing.assert_close(extractor(x)["output"], expected, rtol=0, atol=0, equal_nan=True)
        return
    try:
        found = extractor(x)["output"]
    except featx.SpecializationError:
        return
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_parts_of_a_float_are_those_of_each_input() -> None:
    class Scales(Finite):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * math.modf(x.mean().item() * 3)[0]

    model = Scales(math.isnan).eval()
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=FIRST, adaptive=True)
    for x in (FIRST, FIRST * 1.7):
        assert torch.equal(extractor(x)["output"], model(x))


class SumsInC(nn.Module):
    """Asks `math` about a list, and goes another way where that is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        try:
            total = math.fsum(scores.tolist())
        except (OverflowError, ValueError):
            total = -1.0
        return self.linear(x) * total


@pytest.mark.parametrize("adaptive", [False, True])
def test_an_error_of_math_about_a_list_is_checked(adaptive: bool) -> None:
    model, infinite = SumsInC().eval(), torch.tensor([math.inf, -math.inf])
    extractor = featx.create_feature_extractor(model, ["mul"], example_inputs=(FIRST, infinite), adaptive=adaptive)
    for scores in (infinite, torch.tensor([1.0, 2.0])):
        expected = model(FIRST, scores)
        try:
            found = extractor(FIRST, scores)["mul"]
        except featx.SpecializationError:
            assert not adaptive
            assert scores is not infinite
            continue
        assert torch.equal(found, expected)


class Gathers(nn.Module):
    """Adds up what lies between two numbers, times a third one, and what lies at a fourth one."""

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        start, end, factor, place = numbers.tolist()
        known = np.arange(40.0)
        return x + float(known[start:end].sum()) * factor + [float(each) for each in known][place]


def test_bounds_that_are_equal_are_checked_beside_a_factor_and_a_place() -> None:
    model, x = Gathers(), torch.zeros(1)
    traced = featx.trace(model, x, torch.tensor([1, 1, 2, 5]))
    assert torch.equal(traced(x, torch.tensor([1, 1, 2, 5])), model(x, torch.tensor([1, 1, 2, 5])))
    for numbers in ([1, 3, 2, 5], [1, 3, 1, 5], [2, 3, 2, 5]):
        with pytest.raises(featx.SpecializationError):
            traced(x, torch.tensor(numbers))


class PicksDerived(nn.Module):
    """Runs the layers between two numbers that are computed, beside a number that equals them on the example."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = [torch.sin, torch.exp, torch.cos, torch.tanh, torch.sigmoid]

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        start, end, factor = numbers.tolist()
        for function in self.functions[start + 1 : end + 1]:
            x = function(x)
        return x * factor


def test_bounds_that_equal_a_third_number_are_checked() -> None:
    model, x = PicksDerived(), torch.ones(1)
    traced = featx.trace(model, x, torch.tensor([1, 1, 2]))
    assert torch.equal(traced(x, torch.tensor([1, 1, 2])), model(x, torch.tensor([1, 1, 2])))
    with pytest.raises(featx.SpecializationError):
        traced(x, torch.tensor([1, 3, 2]))


class Converts(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        return self.compute(x, n)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, n: x * int(n),
        lambda x, n: x * (n.item() - int(n)),
        lambda x, n: x * max(int(n), 1),
        lambda x, n: x * int(max(n.item(), 1) + 1),
        lambda x, n: x * sum(map(int, n.repeat(2).tolist())),
        lambda x, n: torch.tensor(int(n)) + x.long(),
        lambda x, n: torch.tensor(float(n)),
        lambda x, n: x[:, : int(n)] * 1,
        lambda x, n: x * (1 if n == int(n) else 2),
    ],
    ids=["int", "rest", "max", "of a max", "sum", "dtype", "float", "slice", "comparison"],
)
@pytest.mark.parametrize("example", [torch.tensor(2), torch.tensor(2.7)], ids=["whole", "fraction"])
def test_conversions_are_those_of_numbers_of_each_dtype(compute: Any, example: torch.Tensor) -> None:
    model, x = Converts(compute), torch.ones(2, 4)
    graph = featx.trace(model, x, example)
    adaptive = featx.create_feature_extractor(model, ["output"], example_inputs=(x, example), adaptive=True)
    for n in (example, torch.tensor(2.7), torch.tensor(3), torch.tensor(3.0), torch.tensor(3.5), example):
        expected = model(x, n)
        found = [adaptive(x, n)["output"]]
        with contextlib.suppress(featx.SpecializationError):
            found.append(graph(x, n))
        for value in found:
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected)


class Patches(nn.Module):
    """Returns tokens and how many there are in a row, as the stages of SegFormer do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 4, 2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = self.embed(x)
        return x.flatten(2), x.shape[3]


class ReadsCounts(nn.Module):
    def __init__(self, use: Callable[[Any, torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.patches, self.layers, self.use = Patches(), nn.ModuleList(nn.Tanh() for _ in range(99)), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, count = self.patches(x)
        return self.use(self, tokens, count)


def by_view(model: Any, tokens: torch.Tensor, count: int) -> torch.Tensor:
    return tokens.view(tokens.shape[0], 4, -1, count)


def by_index(model: Any, tokens: torch.Tensor, count: int) -> torch.Tensor:
    return model.layers[count](tokens) if count > 0 else tokens


def runs_with_other_numbers(use: Any, caplog: pytest.LogCaptureFixture, x: torch.Tensor) -> tuple[Any, int]:
    model = ReadsCounts(use).eval()
    with caplog.at_level(logging.DEBUG, logger="featx"):
        extractor = featx.create_feature_extractor(model, ["patches", "output"], example_inputs=x, adaptive=False)
    return extractor, sum("other numbers from values" in record.getMessage() for record in caplog.records)


def test_numbers_that_runs_at_other_sizes_have_shown_as_others_need_no_further_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    extractor, runs = runs_with_other_numbers(by_view, caplog, torch.rand(1, 3, 64, 64))
    assert runs == 0
    x = torch.rand(2, 3, 12, 16)
    assert torch.equal(extractor(x)["output"], extractor(x)["patches"][0].view(2, 4, 6, 8))


def test_number_that_decides_is_checked_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    extractor, _ = runs_with_other_numbers(by_index, caplog, torch.rand(1, 3, 64, 64))
    with pytest.raises(featx.SpecializationError):
        extractor(torch.rand(1, 3, 64, 32))


class LengthsOfValues(nn.Module):
    """Takes what is between the numbers of positive values in two rows, or what C code makes of both."""

    def __init__(self, use: Callable[[int, int], Any]) -> None:
        super().__init__()
        self.last, self.use = nn.Identity(), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = ((x[row] > 0).nonzero().shape[0] for row in (0, 1))
        return self.last(x * (1 + self.use(first, second)))


LETTERS = "abcdefghij"
OF_TWO: dict[str, Callable[[int, int], Any]] = {
    "list": lambda a, b: sum(range(10)[a:b]),
    "list, in a comprehension": lambda a, b: sum([len(LETTERS[a:b]) for _ in range(2)]),
    "text": lambda a, b: LETTERS.count("d", a, b),
    "found": lambda a, b: LETTERS.find("d", a, b),
    "rows of an array": lambda a, b: float(np.arange(20.0).reshape(2, 10)[:, a:b].sum()),
    "both in a text": lambda a, b: len(f"{a}-{b}" * (a < b)),
}


@pytest.mark.parametrize("use", OF_TWO)
def test_bounds_that_are_lengths_of_values_are_checked(use: str) -> None:
    model = LengthsOfValues(OF_TWO[use]).eval()
    extractor = featx.create_feature_extractor(model, ["last"], example_inputs=torch.ones(4, 6), adaptive=False)
    for counts in itertools.product((0, 2, 5, 6), repeat=2):
        x = -torch.ones(4, 6)
        for row, count in enumerate(counts):
            x[row, :count] = 1
        with contextlib.suppress(featx.SpecializationError):
            assert torch.equal(extractor(x)["last"], model(x))
