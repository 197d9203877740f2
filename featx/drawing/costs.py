"""Read the cost of a node from whatever somebody measured it with."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from featx.errors import ArgumentTypeError

# Any: from a node or its name to a number, numbers by name, or an object that has such fields; or a report.
Costs: TypeAlias = Any
# What says nothing when it is added up over the nodes of a module.
_NO_SUM = re.compile("peak|max|min|mean|median|fastest|slowest|intensity|ratio|percent")


def costs_by_node(costs: Costs) -> Mapping[Any, Any] | None:
    """Return costs by node or name of a node; a report has a list `nodes` of rows that have a `name`.

    Raises:
        ArgumentTypeError: it is neither a mapping nor such a report.
    """
    if costs is None or isinstance(costs, Mapping):
        return costs
    try:
        return {row.name: row for row in costs.nodes}
    except (AttributeError, TypeError):
        raise ArgumentTypeError(
            f"cost is a {type(costs).__name__}; give numbers by node or name, or a report with a row for each node"
        ) from None


def is_summed(name: str) -> bool:
    """Say whether numbers of this name are added up over modules: all but peaks, extremes, means and ratios."""
    return _NO_SUM.search(name.lower()) is None


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
