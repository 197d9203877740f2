"""Edits: let a model go on with another value than the one that it has computed at a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, RequestError
from featx.features.request import Request, as_request
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.recording.module_output import module_output

# A function of the value, or a tensor in its place.
Edit = Callable[[Any], Any] | torch.Tensor


def zero(value: Any) -> Any:
    """Return zeros like a tensor, or like those in a tuple or list: an edit that takes away what a node computes."""
    if isinstance(value, (tuple, list)):
        return type(value)([zero(item) for item in value])
    return torch.zeros_like(value)


class Edits:
    """What is done to which nodes.

    Args:
        edits: by name, pattern, module or class of modules: a function, which gets the value and returns what the model
            goes on with, or a tensor of the same shape.
        model: whose modules are meant.

    Raises:
        ArgumentTypeError: `edits` is no dict, or an edit is neither a function nor a tensor.
        RequestError: two edits are of one node, or as for requests.
    """

    def __init__(self, edits: Any, model: nn.Module) -> None:
        if not isinstance(edits, Mapping):
            raise ArgumentTypeError(f"edits must be a dict from names to functions or tensors, got {edits!r:.80}")
        self._of: dict[str, Edit] = {}
        for wish, edit in edits.items():
            if isinstance(edit, nn.Module) or not (callable(edit) or isinstance(edit, torch.Tensor)):
                raise ArgumentTypeError(
                    f"an edit is a function of the value or a tensor in its place, got {edit!r:.80}; to run a module "
                    "give a function that calls it"
                )
            request = as_request([wish], "edits", model)
            if request.pending:
                raise RequestError(f"the pattern {wish!r} in edits matches no module; name operations one by one")
            for name in request:
                if name in self._of:
                    raise RequestError(f"two edits are of '{name}'")
                self._of[name] = edit

    def with_names(self, request: Request) -> Request:
        """Return a request that has the names of the edited nodes too."""
        others = {name: f"edit of {name}" for name in self._of if name not in request}
        return Request({**dict(request), **others}, request.features, request.expanded, request.pending)

    def make(self, graph: Graph, wanted: Mapping[str, Node], request: Request) -> dict[str, Node]:
        """Edit a traced graph, and return the wanted nodes by key; an edited one is what the edit gives. O(nodes).

        Args:
            graph: is changed.
            wanted: the nodes by key, those of `with_names` too.
            request: the request of the caller.

        Raises:
            RequestError: a node gives a container in which values cannot be told apart.
        """
        keys = self.with_names(request)
        # From the last node to the first: an edit does not see those behind it.
        order = sorted(self._of, key=lambda name: wanted[keys[name]], reverse=True)
        edited = {wanted[keys[name]]: _edit(graph, wanted[keys[name]], self._of[name], name) for name in order}
        return {key: edited.get(wanted[key], wanted[key]) for key in request.values() if key in wanted}


def _edit(graph: Graph, node: Node, edit: Edit, name: str) -> Node:
    users = list(node.users)
    with graph.inserting_after(node):
        if isinstance(edit, torch.Tensor):
            new = graph.call_function(in_place_of, (node, edit, name))
        else:
            new = graph.call_function(edit, (node,))
    new.meta.update({key: value for key, value in node.meta.items() if key in ("shape", "dtype", "nn_module_stack")})
    _replace(graph, node, new, name, users)
    return new


def put_in_place_of(graph: Graph, node: Node, new: Node, name: str) -> None:
    """Let all that uses the value of `node`, which the name means, use that of `new`.

    Raises:
        RequestError: the node gives a container in which values cannot be told apart.
    """
    _replace(graph, node, new, name, list(node.users))


def _replace(graph: Graph, node: Node, new: Node, name: str, users: list[Node]) -> None:
    for user in users:  # checks too: what Python decides by the value, it would decide by the other one
        user.replace_input_with(node, new)
    if node.target is module_output:
        _go_on_with_parts(graph, node, new, name)


def _go_on_with_parts(graph: Graph, mark: Node, new: Node, name: str) -> None:
    """Let what comes behind the mark of what a module returned use the parts of `new` in place of those."""
    returned = mark.args[0]
    if isinstance(returned, Node):
        _replace_behind(mark, returned, new)
        return
    parts: list[tuple[Any, Any]] = []
    if isinstance(returned, dict):
        parts = list(cast(dict[Any, Any], returned).items())
    elif isinstance(returned, (tuple, list)):
        parts = list(enumerate(cast(list[Any], returned)))
    if not parts or any(not isinstance(part, Node) for _, part in parts):
        raise RequestError(f"'{name}' returns a container in containers; name a value inside it")
    last = max(new, mark)
    for key, part in parts:
        with graph.inserting_after(last):
            last = graph.call_method("__getitem__", (new, key))
        _replace_behind(mark, part, last)


def _replace_behind(place: Node, old: Node, new: Node) -> None:
    for user in [user for user in old.users if user > place and user is not new]:
        user.replace_input_with(old, new)


def in_place_of(value: torch.Tensor, given: torch.Tensor, name: str) -> torch.Tensor:
    """Return `given`, which an edit has put in the place of the value of the node `name`.

    Raises:
        RequestError: the shapes differ.
    """
    if given.shape != value.shape:
        raise RequestError(
            f"the edit of '{name}' is a tensor of shape {tuple(given.shape)}; the value has {tuple(value.shape)}"
        )
    return given
