"""Checksums of what is written as JSON, by which an edited or damaged file is told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_KEY = "checksum"


def checksum_of(content: Mapping[str, Any]) -> str:
    """Return a hash of what JSON can hold; the order of keys does not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_checksum(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content as JSON gives it back, with a checksum, which `without_checksum` compares."""
    as_read: dict[str, Any] = json.loads(json.dumps(content))
    return {**as_read, _KEY: checksum_of(as_read)}


def without_checksum(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what `with_checksum` was given; None if it is not as it was.

    Raises:
        KeyError: it has no checksum.
    """
    own = {key: value for key, value in content.items() if key != _KEY}
    return own if content[_KEY] == checksum_of(own) else None
