"""What a traced graph checks when it runs: that Python would decide again as it did on the example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from featx.errors import SpecializationError
from featx.tree import tree_leaves

if TYPE_CHECKING:
    from featx.ir.graph import Graph

_HINT = (
    "The graph holds only where this stays as it was on the example; for other inputs give create_feature_extractor "
    "adaptive=True, or trace again with an example like this input"
)


def check_decision(value: Any, expected: Any, what: str) -> None:
    """Raise unless `value` is what the model saw on the example.

    Raises:
        SpecializationError: it is not; `what` says what was decided, and where.
    """
    if not _is_same(value, expected):
        raise SpecializationError(f"{what}: {_short(value)} now, {_short(expected)} on the example. {_HINT}.")


def check_dtype(value: torch.dtype, allowed: tuple[torch.dtype, ...], what: str) -> None:
    """Raise unless `value` is one of the dtypes in which the model was traced.

    Raises:
        SpecializationError: it is none of them; `what` says where the model read it.
    """
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise SpecializationError(f"{what}: {value} now; the model was traced in {names}. {_HINT}.")


def check_size(value: torch.Tensor, dim: int, expected: int | None, what: str) -> None:
    """Raise unless dimension `dim` of an input has the length that it had on the example; with None, any but 0.

    Raises:
        SpecializationError: it has not; `what` names the input and says why it is fixed.
    """
    length = value.shape[dim] if value.dim() > dim else -1
    if length != expected and (expected is not None or length <= 0):
        known = "others" if expected is None else expected
        raise SpecializationError(
            f"dimension {dim} of {what}: the input has shape {tuple(value.shape)}, the example had {known} there. "
            f"{_HINT}."
        )


def check_form(value: Any, form: Any, what: str) -> None:
    """Raise unless `value` is nested as on the example; `form` is what `form_of` gave then.

    Raises:
        SpecializationError: it is not; `what` names it.
    """
    if form_of(value) != form:
        raise SpecializationError(f"the form of {what}: {form_of(value)} now, {form} on the example. {_HINT}.")


def check_distinct(values: tuple[Any, ...]) -> None:
    """Raise where one tensor is given as two inputs.

    Raises:
        SpecializationError: the model may ask with `is` whether it is, and was traced on two.
    """
    tensors = [id(value) for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    if len(set(tensors)) < len(tensors):
        raise SpecializationError(
            "one tensor is given as two inputs, and the model may compare them with `is`; give a copy as one of them"
        )


def require_distinct_inputs(graph: Graph) -> None:
    """Let `graph` check first that no tensor is given as two inputs, if it has several inputs. O(nodes)."""
    inputs = tuple(graph.find_nodes(op="placeholder"))
    if len(inputs) < 2:
        return
    with graph.inserting_after(inputs[-1]):
        check = graph.call_function(check_distinct, (inputs,))
    check.meta["is_guard"] = check.meta["is_check_of_input"] = True


def form_of(value: Any) -> Any:
    """Describe how `value` is nested, with its tensors by number of dimensions, as a value that compares."""
    if isinstance(value, torch.Tensor):
        return f"tensor of {value.dim()} dimensions"
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *[form_of(item) for item in value])
    if isinstance(value, dict):
        return ("dict", *[(key, form_of(item)) for key, item in value.items()])
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value).__mro__[-2].__name__ if isinstance(value, (int, float)) else type(value).__name__


def require_mode(graph: Graph, training: bool, reason: str) -> None:
    """Let `graph` check first that its module is in train mode, or in eval mode, unless it does so already. O(nodes).

    `reason` says why, and what to do in the other mode.
    """
    for read in graph.find_nodes(op="get_attr", target="training"):
        if any(user.target is check_decision and user.args[1] is training for user in read.users):
            return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        mode = graph.get_attr("training")
        check = graph.call_function(check_decision, (mode, training, f"the train mode ({reason})"))
    check.meta["is_guard"] = True


def _is_same(value: Any, expected: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value == expected)
    if isinstance(expected, float) and expected != expected:
        return bool(value != value)
    return bool(value == expected)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
