"""Put the nodes of one graph in the place of another's in `node.meta`, and mark there what only torch.fx has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from featx.rebuilding import with_items

# Where a converted graph of torch.fx holds the class of the tracer of the graph that it is made of.
TRACER_CLASS = "_featx_tracer_cls"
# In node.meta: what a node that only torch.fx's code needs stands for.
HELPER = "featx_helper"
# In node.meta["is_wrapped"], where torch.fx notes that a function stays one node when the code is traced again.
WRAPPED_HERE = "by featx"


class Translation:
    """Translates `meta` for a copy of a graph.

    `twins` maps the nodes of the graph, which are of class `kind`, to what they are in the copy. A value without nodes
    stays the object that it is, and so does a node that is not in `twins`.
    """

    def __init__(self, twins: Mapping[Any, Any], kind: type) -> None:
        self._twins = twins
        self._kind = kind
        # Containers that many nodes share, by id: themselves, so that they stay alive, and what came of them.
        self._known: dict[int, tuple[Any, Any]] = {}

    def meta(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `meta`, one level deep."""
        return {key: self._value(value) for key, value in meta.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, (tuple, list, dict)):
            known = self._known.get(id(value))
            if known is None:
                known = self._known[id(value)] = (value, self._container(value))
            return known[1]
        if isinstance(value, slice):
            start, stop, step = self._container((value.start, value.stop, value.step))
            return slice(start, stop, step)
        if isinstance(value, self._kind):
            return self._twins.get(value, value)
        return value

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            changed = {key: self._value(item) for key, item in cast(dict[Any, Any], value).items()}
            return value if all(changed[key] is value[key] for key in changed) else changed
        items = [self._value(item) for item in value]
        is_same = all(item is earlier for item, earlier in zip(items, value, strict=True))
        return value if is_same else with_items(value, items)
