"""Name the nodes that are the tensors inside what a module returns, for the error of a request for one tensor."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from featx.features.building.tracing import ModelTracing
from featx.features.requests.select import names_of, select
from featx.ir.node import Node
from featx.tracing.nodes.module_output import module_output


def names_of_items(tracing: ModelTracing, name: str) -> dict[str, str]:
    """Return the names of the nodes inside the value of `name`, by what takes them out, such as `[0]`.

    The model is traced again, with all names. Where that fails, or a tensor has no name, there is none; nor where nodes
    have other names because of `name`, as a further item that is taken out moves the numbers of later ones.
    """
    try:
        graph = tracing.graph([name], may_end_early=True)
        if names_of(graph) != names_of(tracing.graph(may_end_early=True)):
            return {}
        node = select(graph, {name: name}, "the model")[name]
    except Exception:  # the model's own too; the error that asks for the names says enough
        return {}
    named = ((path, part.meta.get("qualified_name")) for path, part in _parts(node, ""))
    return {path: str(known) for path, known in named if path and known is not None}


def _parts(value: Any, path: str) -> Iterator[tuple[str, Node]]:
    """Yield the nodes in a container of nodes, and those that take items out of the value of a node."""
    if isinstance(value, Node):
        if value.target is module_output:
            yield from _parts(value.args[0], path)
            return
        if isinstance(value.target, type) and issubclass(value.target, Mapping):  # OrderedDict({"out": ...})
            for given in (*value.args, value.kwargs):
                yield from _parts(given, path)
            return
        yield path, value
        for user in value.users:
            if user.target is operator.getitem and user.args[0] is value:
                yield from _parts(user, f"{path}[{user.args[1]!r}]")
    elif isinstance(value, Mapping):
        for key, item in cast(Mapping[Any, Any], value).items():
            yield from _parts(item, f"{path}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(cast(Sequence[Any], value)):
            yield from _parts(item, f"{path}[{index}]")
