"""Edits: let a model go on with another value than the one that it has computed at a node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import pairwise
from operator import getitem
from typing import Any, cast

import torch
from torch import nn

from featx.errors import ArgumentTypeError, RequestError
from featx.features.requests.request import Request, as_request
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.tracing.nodes.module_output import module_output, node_that_made, returned_apart
from featx.tree import tensors_in, tree_map

# A function or a module that gets the value, or a tensor in its place.
Edit = Callable[[Any], Any] | nn.Module | torch.Tensor


def zero(value: Any) -> Any:
    """Return zeros like a tensor, or like those in containers and objects: an edit that takes away what a node gives.

    What is no tensor stays, such as the None beside the result of an attention.
    """
    return tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


class Edits:
    """What is done to which nodes.

    Args:
        edits: by name, pattern, module or class of modules: a function or module, which gets the value and returns what
            the model goes on with, or a tensor in its place (see `in_place_of`). The path of a module means each call.
        model: whose modules are meant.

    Raises:
        ArgumentTypeError: `edits` is no dict, or an edit is neither a function, a module nor a tensor.
        RequestError: two edits are of one node, or as for requests.
    """

    def __init__(self, edits: Any, model: nn.Module) -> None:
        if not isinstance(edits, Mapping):
            raise ArgumentTypeError(f"edits must be a dict from names to functions or tensors, got {edits!r:.80}")
        self._of: dict[str, Edit] = {}
        # Patterns that match no module; they may match operations, which a trace knows.
        self.pending: dict[str, Edit] = {}
        for wish, edit in edits.items():
            if isinstance(edit, type) or not (callable(edit) or isinstance(edit, torch.Tensor)):
                raise ArgumentTypeError(
                    f"an edit is a function or module that gets the value, or a tensor in its place, got {edit!r:.80}"
                )
            if not isinstance(edit, (torch.Tensor, nn.Module)):
                _check_takes_one_value(edit, wish)
            request = as_request([wish], "edits", model)
            for pattern in request.pending:
                self.pending[pattern] = edit
            self._add(request, edit)

    def _add(self, names: Iterable[str], edit: Edit) -> None:
        for name in names:
            if name in self._of:
                raise RequestError(f"two edits are of '{name}'")
            self._of[name] = edit

    def among(self, names: Collection[str]) -> None:
        """Match the patterns that are of no module with these names of operations.

        Raises:
            NodeNameError: one matches none of them.
            RequestError: two edits are of one node.
        """
        for pattern, edit in self.pending.items():
            self._add(Request({}, {}, {}, {pattern: (None, 0)}).among(names, "edits"), edit)
        self.pending = {}

    @property
    def names(self) -> Collection[str]:
        """Of the edited nodes, as far as they are known."""
        return self._of.keys()

    def with_names(self, request: Request) -> Request:
        """Return a request that has the names of the edited nodes too."""
        others = {name: f"edit of {name}" for name in self._of if name not in request}
        return Request({**dict(request), **others}, request.features, request.expanded, request.pending)

    def make(self, graph: Graph, requested: Mapping[str, Node], request: Request) -> dict[str, Node]:
        """Edit a traced graph, and return the requested nodes by key; an edited one is what the edit gives. O(nodes).

        Args:
            graph: is changed.
            requested: the nodes by key, those of `with_names` too.
            request: the request of the caller.

        Raises:
            RequestError: an edited value is an input of the extractor, or two edits are of one value.
        """
        keys = self.with_names(request)
        given = [name for name in self._of if keys[name] not in requested]
        if given:
            raise RequestError(
                f"'{given[0]}' is among the inputs, so that the extractor is given its value; leave the edit out, and "
                "give the edited value"
            )
        # From the last node to the first: an edit does not see those after it.
        calls = [(node, name) for name in self._of for node in _calls_meant(graph, name, requested[keys[name]])]
        calls.sort(key=lambda call: call[0], reverse=True)
        for (node, name), (other, other_name) in pairwise(calls):
            if node is other:
                raise RequestError(f"'{name}' and '{other_name}' are one value, and both are edited; make it one edit")
        edited = {node: _edit(graph, returned_apart(node), self._of[name], name) for node, name in calls}
        return {key: edited.get(requested[key], requested[key]) for key in request.values() if key in requested}

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that are edits, by the key under which an extractor has them."""
        return {_key_of(name): edit for name, edit in self._of.items() if isinstance(edit, nn.Module)}

    def call_modules(self, graph: Graph, path_of: Callable[[str], str]) -> None:
        """Let a graph call the modules that are edits where the extractor has them: at `path_of` a key. O(nodes)."""
        for node in list(graph.nodes):
            if node.op == "call_function" and isinstance(node.target, nn.Module):
                with graph.inserting_before(node):
                    called = graph.call_module(path_of(_key_of(node.meta["calls_edit_of"])), node.args)
                called.meta = node.meta
                node.replace_all_uses_with(called)
                graph.erase_node(node)

    def check_effect(self, graph: Graph) -> None:
        """Check that each edit is in the graph of an extractor, from which is cut out what no requested value needs.

        Raises:
            RequestError: one is not.
        """
        kept = {node.meta.get("edit_of") for node in graph.nodes}
        dropped = [name for name in self._of if name not in kept]
        if dropped:
            raise RequestError(
                f"the edit of '{dropped[0]}' changes nothing that is requested: it lies after all requested values, "
                "before the inputs, or in another branch; request a value that is computed from it, or leave it out"
            )


def _calls_meant(graph: Graph, name: str, node: Node) -> list[Node]:
    """Return the nodes of all calls of the module at `name`, as a hook would change each; else `node` alone."""
    calls = [
        each
        for each in graph.nodes
        if (each.op == "call_module" and each.target == name) or name in each.meta.get("returned_by", ())
    ]
    return calls if node in calls else [node]


def _check_takes_one_value(edit: Callable[..., Any], wish: object) -> None:
    """Raise where a function cannot be called with one argument, as far as Python knows its parameters."""
    try:
        signature = inspect.signature(edit)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ArgumentTypeError(
            f"the edit of {wish!r:.80} takes {signature}; it is called with the value alone, and returns what the "
            "model goes on with: lambda value: ..."
        ) from error


def note_shapes_behind_edits(requested: Mapping[str, Node], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Let requested nodes have the shapes that they have with the edits, which a trace of the model does not know.

    Args:
        requested: the nodes by key.
        shapes: the shapes by key, as far as they are known.
    """
    behind: set[Node] = set()
    for node in next(iter(requested.values())).graph.nodes if requested else ():
        # A tensor as an edit is checked to be of the right shape.
        if node.target is checked_edit or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for key, node in requested.items():
        made = node_that_made(node)
        if made in behind and "shape" in made.meta:
            if key in shapes:
                made.meta["shape"] = torch.Size(shapes[key])
            else:
                del made.meta["shape"]


def _edit(graph: Graph, node: Node, edit: Edit, name: str) -> Node:
    if node.meta.get("has_no_layout"):  # computed beside a fused call
        raise RequestError(
            f"'{name}' cannot be edited: attention is fused there, and the model does not use its probabilities. Edit "
            "what the attention returns, or make the model without fused attention (fused_attn=False of timm, "
            "attn_implementation='eager' of transformers)"
        )
    shape = node.meta.get("shape")
    if isinstance(edit, torch.Tensor) and shape is not None and edit.dim() != len(shape):
        raise RequestError(
            f"the edit of '{name}' is a tensor of shape {tuple(edit.shape)}; on the example the value has "
            f"{tuple(shape)}. A mean needs as many dimensions: value.mean(0, keepdim=True)"
        )
    users = list(node.users)
    given = node
    if "shape" not in node.meta:
        with graph.inserting_after(node):
            node = graph.call_function(with_distinct_parts, (node, name))
        node.meta.update({key: given.meta[key] for key in ("nn_module_stack",) if key in given.meta})
    with graph.inserting_after(node):
        if isinstance(edit, torch.Tensor):
            new = graph.call_function(in_place_of, (node, edit, name))
        else:
            new = _call_edit(graph, node, edit, name)
    new.meta.update({key: value for key, value in node.meta.items() if key in ("shape", "dtype", "nn_module_stack")})
    new.meta["edit_of"] = name
    _replace(graph, given, new, users)
    return new


def _call_edit(graph: Graph, node: Node, edit: Callable[[Any], Any], name: str) -> Node:
    """Add the call of an edit after a node, with a check of what it does. Return what gives the result."""
    versions = graph.call_function(versions_of, (node,))
    with graph.inserting_after(versions):
        new = graph.call_function(edit, (node,))
    if isinstance(edit, nn.Module):  # of which the graph of the model knows nothing yet
        new.meta["calls_edit_of"] = name
    with graph.inserting_after(new):
        return graph.call_function(checked_edit, (new, node, versions, name))


def _key_of(name: str) -> str:
    return f"edit of {name}"


def replace_uses(graph: Graph, node: Node, new: Node) -> None:
    """Let all that uses the value of `node` use that of `new`."""
    _replace(graph, node, new, list(node.users))


def _replace(graph: Graph, node: Node, new: Node, users: list[Node]) -> None:
    for user in users:  # checks too: what Python decides by the value, it would decide by the other one
        user.replace_input_with(node, new)
    if not node.meta.get("is_apart"):
        _go_on_with_parts(graph, node, new)


def _go_on_with_parts(graph: Graph, mark: Node, new: Node) -> None:
    """Let what comes after a node that holds values of other nodes use the parts of `new` in place of those.

    The node marks what a module has returned, or makes an object of its parts.
    """
    last = max(new, mark)

    def go_on(returned: Any, steps: tuple[tuple[Any, Any], ...]) -> None:
        nonlocal last
        if isinstance(returned, Node):
            users = [user for user in returned.users if user > mark and user is not new]
            if users and steps:
                value = new
                for function, key in steps:
                    with graph.inserting_after(last):
                        last = value = graph.call_function(function, (value, key))
            else:
                value = new
            for user in users:
                user.replace_input_with(returned, value)
        for step, part in _parts_of(returned):
            go_on(part, (*steps, step))

    if mark.target is module_output:
        go_on(mark.args[0], ())
    else:
        for step, part in _parts_of(mark):
            go_on(part, (step,))


def _parts_of(returned: Any) -> list[tuple[tuple[Any, Any], Any]]:
    """Return the parts of a container, and how each is taken out of it."""
    if isinstance(returned, Node):  # an object that the model has made of its parts, as the outputs of transformers
        is_made = returned.op == "call_function" and isinstance(returned.target, type)
        return [((getattr, key), part) for key, part in returned.kwargs.items()] if is_made else []
    if isinstance(returned, dict):
        return [((getitem, key), part) for key, part in cast(dict[Any, Any], returned).items()]
    if isinstance(returned, (tuple, list)):
        return [((getitem, key), part) for key, part in enumerate(cast(list[Any], returned))]
    return []


def with_distinct_parts(value: Any, name: str) -> Any:
    """Return a value that is going to be edited, the value of the node `name`.

    Raises:
        RequestError: it has one tensor in two places, so that the model may mean either of them by that tensor.
    """
    tensors = [id(leaf) for leaf in tensors_in(value)]
    if len(set(tensors)) < len(tensors):
        raise RequestError(f"'{name}' returns one tensor in two places, which cannot be edited apart; edit the tensor")
    return value


def versions_of(value: Any) -> list[int]:
    """Return how often each tensor in a value has been written; nothing in a compiler."""
    if torch.compiler.is_compiling():
        return []
    leaves = (leaf for leaf in tensors_in(value) if not leaf.is_inference())
    return [leaf._version for leaf in leaves]


def checked_edit(result: Any, value: Any, versions: list[int], name: str) -> Any:
    """Return what an edit of the node `name` has returned.

    Args:
        result: what it has returned.
        value: what it was given.
        versions: `versions_of(value)` before that.
        name: of the node.

    Raises:
        RequestError: it has returned nothing or another kind of value, or has written what it was given, which may be
            that of other nodes too.
    """
    if result is None and value is not None:
        raise RequestError(
            f"the edit of '{name}' returned None; an edit returns what the model goes on with, which may be the value "
            "that it was given"
        )
    if _is_other_container(value, result):
        is_tensor = isinstance(value, torch.Tensor)
        advice = "a tensor" if is_tensor else "as many parts: lambda value: (change(value[0]), *value[1:])"
        raise RequestError(
            f"the edit of '{name}' returned {_described(result)}, and gets {_described(value)}; it returns {advice}"
        )
    if versions_of(value) != versions:
        raise RequestError(
            f"the edit of '{name}' writes into the value that it was given, which is the value of other nodes too; "
            "let it change a copy: value = value.clone()"
        )
    return result


def in_place_of(value: torch.Tensor, given: torch.Tensor, name: str) -> torch.Tensor:
    """Return a copy of `given`, which an edit has put in the place of the value of the node `name`.

    It is of the dtype and on the device of the value, and has its shape: what has one place along a dimension, such as
    a mean over the batch, is repeated there. The model may write it.

    Raises:
        RequestError: the value is no tensor, or the shapes do not fit.
    """
    if not isinstance(cast(Any, value), torch.Tensor):
        raise RequestError(
            f"the edit of '{name}' is a tensor, and the value is {_described(value)}; edit a part of it by a function: "
            "lambda value: (tensor, *value[1:])"
        )
    if given.dim() != value.dim() or any(a not in (1, b) for a, b in zip(given.shape, value.shape, strict=True)):
        raise RequestError(
            f"the edit of '{name}' is a tensor of shape {tuple(given.shape)}; the value has {tuple(value.shape)}. "
            "Along each dimension it has as many places as the value, or one"
        )
    return given.to(value.device, value.dtype).expand_as(value).clone()


def _is_other_container(value: Any, result: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not isinstance(result, torch.Tensor)
    if isinstance(value, (tuple, list)):
        return not isinstance(result, (tuple, list)) or len(cast(Any, result)) != len(cast(Any, value))
    return isinstance(value, Mapping) and not isinstance(result, Mapping)


def _described(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(cast(object, value)).__name__} of {len(cast(Any, value))}"
    if isinstance(value, Mapping):
        return f"a {type(cast(object, value)).__name__} of {', '.join(map(str, cast(Any, value)))}"
    return f"a {type(value).__name__}"
