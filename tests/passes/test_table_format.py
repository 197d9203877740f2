from __future__ import annotations

import pytest

from featx.passes.table_format import clipped, format_table, in_seconds, with_prefix


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "", "0"),
        (0, "B", "0 B"),
        (7, "B", "7 B"),
        (999, "", "999"),
        (999.6, "", "1.00 k"),
        (1000, "", "1.00 k"),
        (12_345, "B", "12.3 kB"),
        (123_456, "", "123 k"),
        (999_700, "", "1.00 M"),
        (4_089_184_256, "", "4.09 G"),
        (2.5e12, "FLOP/s", "2.50 TFLOP/s"),
        (3e15, "", "3.00 P"),
        (0.25, "", "0.25"),
    ],
)
def test_numbers(value: float, unit: str, text: str) -> None:
    assert with_prefix(value, unit) == text


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (4.56e-5, "45.6 us"), (0.0, "0 us")]
)
def test_times(value: float, text: str) -> None:
    assert in_seconds(value) == text


def test_table_and_clipping() -> None:
    assert format_table(("name", "n"), [("a", "1"), ("long", "22")], text_columns=1) == (
        "name   n\n----  --\na      1\nlong  22"
    )
    assert clipped("abcdefgh", 8) == "abcdefgh"
    assert clipped("abcdefghi", 8) == "abcde..."
