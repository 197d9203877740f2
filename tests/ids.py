"""Names of parametrized cases that are the same in every process, as tests that run in several ones need."""

from __future__ import annotations

import re


def without_address(value: object) -> str:
    """Return the repr of a value without the addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
