"""Probabilities of fused attention, which the model itself never computes: nodes beside the fused calls."""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's documentation has it

from featx.errors import NodeNameError, RequestError
from featx.features.describing.shapes import forms_of
from featx.features.requests.request import PROBABILITIES, Request
from featx.ir.effects import MeasuredEffects
from featx.ir.graph import Graph
from featx.ir.node import Node

# The node beside a fused call: `blocks.3.attn.probabilities`, `blocks.3.attn.probabilities_1`.
_NAME = re.compile(rf"(?:(.*)\.)?{PROBABILITIES}(_\d+)?")
_LATER_CALL = re.compile(r"(.*)(_\d+)")
# Functions of torch that fuse attention, which are the last parts of the names of their nodes.
FUSED_FUNCTIONS = ("scaled_dot_product_attention", "multi_head_attention_forward")
# The key of a fused call that was not requested.
_UNASKED = "fused attention of"
_FUSED_NAME = re.compile(rf"(?:(.*)\.)?(?:{'|'.join(FUSED_FUNCTIONS)})(_\d+)?")
_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention_probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return the probabilities with which `scaled_dot_product_attention` weighs the values, before its dropout.

    A query whose mask leaves it no key has probabilities of 0.

    Args:
        query: of shape (..., heads, L, E).
        key: of shape (..., heads, S, E), or with fewer heads for grouped queries.
        attn_mask: added to the scores, or, of booleans, True where a query may attend to a key.
        is_causal: let queries attend to keys up to their own place alone.
        scale: of the scores; by default `1 / sqrt(E)`.
        enable_gqa: repeat the heads of the keys for those of the queries.

    Returns:
        A tensor of shape (..., heads, L, S), of the dtype of the query; its softmax is computed in float32 at least.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    if is_causal:
        places = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~places, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    has_no_key = (scores == float("-inf")).all(-1, keepdim=True)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).masked_fill(has_no_key, 0.0).to(query.dtype)


def with_probabilities(names: Iterable[str], modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield names of nodes and, after those of fused attention, the names of their probabilities."""
    for name in names:
        yield name
        found = _FUSED_NAME.fullmatch(name)
        if found is not None:
            yield _joined(found[1], found[2])
            continue
        path, number = _call_of(name, modules)
        if path in modules:
            yield from (_joined(inner, number) for inner in _attentions_in(path, modules))


def _call_of(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, str | None]:
    """Return the path of a module and which of its later calls a name means: `_1` of `attn_1`."""
    found = None if name in modules else _LATER_CALL.fullmatch(name)
    return (name, None) if found is None else (found[1], found[2])


def _attentions_in(path: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the paths of torch's attentions in a module of torch, which is one node of a list of names."""
    for inner, module in modules[path].named_modules():
        if type(module) is nn.MultiheadAttention:
            yield f"{path}.{inner}" if inner else path


class Probabilities:
    """What is requested of the probabilities of a model.

    Args:
        request: names with their keys; those of probabilities are those of no module.
        modules: those of the model, by path.
        function: which of the fused functions the model is taken to call.
    """

    def __init__(self, request: Request, modules: Mapping[str, nn.Module], function: str) -> None:
        self._modules = modules
        # From the name of the probabilities to that of the fused call.
        self._fused: dict[str, str] = {}
        for name in request:
            found = _NAME.fullmatch(name)
            if found is None or name in modules:
                continue
            owner, number = found[1] or "", found[2] or ""
            is_of_torch = bool(owner) and type(modules.get(owner)) is nn.MultiheadAttention
            self._fused[name] = f"{owner}{number}" if is_of_torch else f"{owner}.{function}{number}".lstrip(".")

    @property
    def names(self) -> list[str]:
        """The names of the requested probabilities."""
        return list(self._fused)

    def is_meant_by(self, error: NodeNameError) -> bool:
        """Say whether an error is about one of the fused calls."""
        return error.name in self._fused.values()

    def as_fused(self, request: Request) -> Request:
        """Return a request with the fused calls in the place of their probabilities."""
        keys = {name: key for name, key in request.items() if name not in self._fused}
        for fused in self._fused.values():
            keys.setdefault(fused, f"{_UNASKED} {fused}")
        expanded = {what: [self._fused.get(name, name) for name in names] for what, names in request.expanded.items()}
        return Request(keys, request.features, expanded, request.pending)

    def make(self, graph: Graph, found: Mapping[str, Node], request: Request) -> dict[str, Node]:
        """Put the nodes into a traced graph, which is changed, and return the requested nodes by key.

        Args:
            graph: a traced graph.
            found: its nodes by the keys of `as_fused`.
            request: what was asked for.

        Raises:
            NodeNameError: a node is no call of fused attention.
        """
        requested: dict[str, Node] = {}
        keys = self.as_fused(request)
        for name, key in request.items():
            if name in self._fused:
                fused = found.get(keys[self._fused[name]])
                if fused is not None:  # one of those that a pattern stands for may not run
                    requested[key] = _beside(graph, fused, name, self._modules)
            elif key in found:
                requested[key] = found[key]
        others = {key: node for key, node in found.items() if key not in requested and not key.startswith(_UNASKED)}
        return {**requested, **others}


def probabilities_beside(graph: Graph, nodes: Mapping[str, Node], modules: Mapping[str, nn.Module]) -> dict[str, Node]:
    """Return what would compute the probabilities of the fused calls among `nodes`, by name, in a copy of `graph`.

    Args:
        graph: a traced graph.
        nodes: some of its nodes, by their names.
        modules: those of the model, by path.
    """
    found: dict[str, Node] = {}
    copies: dict[Node, Node] = {}
    copy = Graph()
    for fused, node in nodes.items():
        for name in list(with_probabilities([fused], modules))[1:]:
            if not copies:
                copy.graph_copy(graph, copies)
            with suppress(NodeNameError):  # a function of the model that has the name of one of torch's
                found[name] = _beside(copy, copies[node], name, modules)
    return found


def _beside(graph: Graph, fused: Node, name: str, modules: Mapping[str, nn.Module]) -> Node:
    with graph.inserting_before(fused):
        if fused.target is F.scaled_dot_product_attention:
            node = _beside_sdpa(graph, fused)
        elif fused.op == "call_module" and type(modules.get(fused.target)) is nn.MultiheadAttention:
            node = _beside_module(graph, fused, cast("nn.MultiheadAttention", modules[fused.target]))
        elif fused.target is F.multi_head_attention_forward:
            node = _beside_multihead(graph, fused.args, fused.kwargs)
        else:
            raise NodeNameError(f"'{name}' would be the probabilities of fused attention, and there is none")
    for each in (node, *node.all_input_nodes):  # pure, whatever the operators of a function may write in general
        if each.target in (attention_probabilities, F.multi_head_attention_forward):
            each.meta["effects"] = MeasuredEffects()
    node.meta["qualified_name"] = name
    node.meta["has_no_layout"] = True
    # A graph that has its weights and does not call it looks into no part of a module of torch.
    stack: dict[str, Any] = fused.meta.get("nn_module_stack") or {}
    node.meta["nn_module_stack"] = {path: around for path, around in stack.items() if path != fused.target}
    return node


def _joined(owner: str | None, number: str | None) -> str:
    return f"{owner}.{PROBABILITIES}{number or ''}" if owner else f"{PROBABILITIES}{number or ''}"


def _beside_sdpa(graph: Graph, fused: Node) -> Node:
    given = {**dict(zip(_SDPA_ARGUMENTS, fused.args, strict=False)), **fused.kwargs}
    kwargs = {name: given[name] for name in ("attn_mask", "is_causal", "scale", "enable_gqa") if name in given}
    node = graph.call_function(attention_probabilities, (given["query"], given["key"]), kwargs)
    (query, dtype), (key, _) = _form_of(given["query"]), _form_of(given["key"])
    if query is not None and key is not None:
        node.meta.update(shape=torch.Size([*query[:-1], key[-2]]), dtype=dtype)
    return node


def _form_of(value: Node) -> tuple[tuple[int, ...] | None, torch.dtype | None]:
    """Return shape and dtype of a tensor, which may be one that a module returns in a tuple."""
    return forms_of(value).get("", (None, None))


def _beside_module(graph: Graph, fused: Node, module: nn.MultiheadAttention) -> Node:
    """Compute the probabilities of torch's module from its weights: a second call of it would run its hooks again."""
    given = inspect.signature(module.forward).bind(*fused.args, **fused.kwargs).arguments
    inputs = [given.pop(name) for name in ("query", "key", "value")]
    shape, _ = _form_of(inputs[0])
    if shape is None:
        raise RequestError(
            f"the probabilities of '{fused.target}' follow from the shapes of its inputs, which a symbolic trace does "
            "not know; give example_inputs that the model takes"
        )
    if module.batch_first and len(shape) == 3:
        inputs = [_transposed(graph, value) for value in inputs]

    def weight(name: str) -> Node | None:
        owner, _, last = name.rpartition(".")
        holder = getattr(module, owner) if owner else module
        return None if getattr(holder, last) is None else graph.get_attr(f"{fused.target}.{name}")

    kwargs: dict[str, Any] = {
        name: given[name] for name in ("key_padding_mask", "attn_mask", "is_causal") if name in given
    }
    if not module._qkv_same_embed_dim:
        kwargs["use_separate_proj_weight"] = True
        kwargs.update({name: weight(name) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")})
    args = (
        *inputs, module.embed_dim, module.num_heads,
        weight("in_proj_weight"), weight("in_proj_bias"), weight("bias_k"), weight("bias_v"), module.add_zero_attn,
        0.0, weight("out_proj.weight"), weight("out_proj.bias"),
    )  # fmt: skip
    return _beside_multihead(graph, args, kwargs)


def _transposed(graph: Graph, value: Node) -> Node:
    node = graph.call_method("transpose", (value, 0, 1))
    shape, dtype = _form_of(value)
    if shape is not None:
        node.meta.update(shape=torch.Size([shape[1], shape[0], *shape[2:]]), dtype=dtype)
    return node


def _beside_multihead(graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    bound.update(training=False, need_weights=True, average_attn_weights=False)
    both = graph.call_function(F.multi_head_attention_forward, (), dict(bound))
    node = graph.call_function(operator.getitem, (both, 1))
    (query, dtype), (key, _) = _form_of(bound["query"]), _form_of(bound["key"])
    if query is not None and key is not None and bound.get("static_k") is None:
        others = key[0] + (bound.get("bias_k") is not None) + bool(bound.get("add_zero_attn"))
        node.meta.update(shape=torch.Size([*query[1:-1], bound["num_heads"], query[0], others]), dtype=dtype)
    return node
