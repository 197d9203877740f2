from __future__ import annotations

import pytest
from torch import nn

from featx.containers import PartOfList


def part() -> PartOfList:
    """Return the modules 0, 2 and 5 of a list."""
    found = PartOfList()
    for number in (0, 2, 5):
        found.add_module(str(number), nn.Linear(1, number + 1))
    return found


def numbers(modules: list[nn.Linear]) -> list[int]:
    return [module.out_features - 1 for module in modules]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        (slice(None), [0, 2, 5]), (slice(1, None), [2, 5]), (slice(2, 5), [2]), (slice(None, None, 2), [0, 2]),
        (slice(-2, None), [2, 5]), (slice(None, -1), [0, 2]), (slice(-3, -1), [0, 2]), (slice(-9, None), [0, 2, 5]),
        (slice(None, -9), []), (slice(-1, None, -1), [5, 2, 0]), (slice(None, -9, -1), [5, 2, 0]),
    ],
)  # fmt: skip
def test_slice_counts_from_the_start_in_the_model_and_from_the_end_here(bounds: slice, expected: list[int]) -> None:
    assert numbers(part()[bounds]) == expected
    assert numbers([part()[-2]]) == numbers(part()[-2:])[:1] == [2]


def test_modules_are_added_behind_the_last_one() -> None:
    found, added = part(), [nn.ReLU() for _ in range(3)]
    assert found.append(added[0]) is found
    found.extend(added[1:])
    assert [name for name, _ in found.named_children()] == ["0", "2", "5", "6", "7", "8"]
    assert list(found)[3:] == added
