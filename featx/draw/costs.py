"""Read the cost of a node from whatever somebody measured it with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from featx.errors import ArgumentTypeError

# Any: from a node or its name to a number, numbers by name, or an object that has such fields.
Costs: TypeAlias = Mapping[Any, Any]


def numbers_in(found: object, name: str) -> dict[str, float]:
    """Return the numbers in a mapping, in the fields of an object, or one number as "cost".

    Raises:
        ArgumentTypeError: it is none of these; `name` is the node's, for the message.
    """
    if isinstance(found, (int, float)):
        return {"cost": found}
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = {item.name: getattr(found, item.name) for item in dataclasses.fields(found)}
    elif isinstance(found, tuple) and hasattr(found, "_asdict"):
        found = cast(Any, found)._asdict()
    if not isinstance(found, Mapping):
        raise ArgumentTypeError(
            f"the cost of node '{name}' is a {type(found).__name__}; give a number, numbers by name, or a dataclass"
        )
    numbers = cast(Mapping[Any, Any], found)
    return {
        str(key): value
        for key, value in numbers.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
