"""What a traced graph checks when it runs: that Python would decide again as it did on the example."""

# TorchScript picks among overloads of one name, which torch.jit does not export by name for type checkers.
# pyright: reportRedeclaration=false, reportPrivateImportUsage=false

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from featx.errors import SpecializationError
from featx.ir.equality import is_same
from featx.ir.memory import overlap
from featx.ir.runtime_checks import runtime_check
from featx.rebuilding import attributes_beside_items, attributes_of
from featx.tracing.guards.forms import form_of, form_of_result
from featx.tracing.guards.scripted_checks import is_same_in_script, text_of_form, text_of_known_form
from featx.tracing.objects.arrays import description_of, is_array
from featx.tracing.objects.plain_objects import is_plain_object
from featx.tree import items_at

if TYPE_CHECKING:
    from featx.ir.graph import Graph
    from featx.ir.node import Node


_COMPILED = (
    "compilers and exporters let the model keep its mask, with padding or without. The example had no padding, so "
    "that this graph leaves the mask out. To compile or export, make the extractor with an example whose mask has a 0"
)
_DRAWN = (
    "The model draws this at random, and no graph holds for each draw. Switch it off (eval mode, or a rate of 0, such "
    "as layerdrop=0), or request values around the module that decides, which is kept whole then"
)


def _hint() -> str:  # a function, because TorchScript reads no global strings
    return (
        "The graph is valid only if this is the same as in the example; for other inputs pass "
        "adaptive=True to create_feature_extractor or create_backbone (but for one with inputs=...), or trace again "
        "with an example like this input"
    )


@runtime_check
def check_decision(value: Any, expected: Any, what: str, when_compiled: str = "check") -> None:
    """Raise unless `value` is what the model saw on the example.

    Args:
        value: what the model sees now.
        expected: what it saw on the example.
        what: names that, for the message.
        when_compiled: what holds under torch.compile, torch.export and torch.jit.trace, where the model may not ask for
            the value: "no", it decides so then; "pass", it computes the same in both cases; "check", it asks. With
            "drawn" it asks, too: the model draws the value at random.

    Raises:
        SpecializationError: it is not; `what` says what was decided, and where.
    """
    if torch.jit.is_scripting():
        if not is_same_in_script(value, expected):
            raise SpecializationError(f"{what} is not what it was on the example. {_hint()}.")
    elif when_compiled in ("no", "pass") and (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        if when_compiled == "no" and expected:
            raise SpecializationError(f"{what}: {_COMPILED}")
    elif not _is_same(value, expected):
        hint = _DRAWN if when_compiled == "drawn" else _hint()
        found = not expected if _are_truth_values(value, expected) else value
        raise SpecializationError(f"{what}: {_short(found)} now, {_short(expected)} on the example. {hint}.")


@runtime_check
def check_constant(value: Any, expected: Any, what: str) -> None:
    """Raise unless an input that is no tensor is what it was on the example: of the same class, and equal.

    A tensor that equals a number is something else to the model: it has a shape and a dtype, and may have a gradient.

    Raises:
        SpecializationError: it is not; `what` names the input.
    """
    if torch.jit.is_scripting():
        if not is_same_in_script(value, expected):
            raise SpecializationError(f"{what} is not what it was on the example. {_hint()}.")
    elif not is_same(value, expected):
        raise SpecializationError(f"{what}: {_short(value)} now, {_short(expected)} on the example. {_hint()}.")


@runtime_check
def check_not_given(value: Any | None, what: str) -> None:
    """Raise where an input is given that was left out on the example, or None there.

    Raises:
        SpecializationError: it is given; `what` names it.
    """
    if value is not None:
        raise SpecializationError(f"{what} is given now, but was omitted or None in the example. {_hint()}.")


@runtime_check
def check_dtype(value: torch.dtype, allowed: list[torch.dtype], what: str) -> None:
    """Raise unless `value` is one of the dtypes in which the model was traced.

    Raises:
        SpecializationError: it is none of them; `what` says where the model read it.
    """
    if value not in allowed:
        names = ", ".join([str(dtype) for dtype in allowed])
        raise SpecializationError(f"{what}: {value} now; the model was traced in {names}. {_hint()}.")


@runtime_check
def check_is_tensor(value: torch.Tensor, what: str) -> None:
    """Raise unless an input is a tensor, as on the example.

    Raises:
        SpecializationError: it is not; `what` names the input.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript leaves out what stands inside
        if not isinstance(value, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            way = _hint() if value is None or not what.startswith("input") else _as_tensor(type(value).__name__)
            raise SpecializationError(f"{what} is {_short(value)} now, a tensor on the example. {way}.")


def _as_tensor(kind: str) -> str:
    if kind == "Proxy":
        return (
            "A graph that was traced on an example is not traced symbolically again: make it with tracer='symbolic', "
            "or let the tracer keep it as a leaf module"
        )
    if kind == "ndarray":
        return "Give a tensor: torch.from_numpy makes one of an array"
    return "Give a tensor, and several inputs by position or by name"


@runtime_check
def check_rank(value: torch.Tensor, expected: int, what: str) -> None:
    """Raise unless an input has as many dimensions as on the example.

    Raises:
        SpecializationError: it has not; `what` names the input.
    """
    if value.dim() != expected:
        raise SpecializationError(f"{what} has {value.dim()} dimensions now, {expected} on the example. {_hint()}.")


@runtime_check
def check_size(value: torch.Tensor, dim: int, expected: int | None, what: str) -> None:
    """Raise unless dimension `dim` of an input has the length that it had on the example; with None, any but 0.

    Raises:
        SpecializationError: it has not; `what` names the input and says why it is fixed.
    """
    length = value.shape[dim] if value.dim() > dim else -1
    if expected is None:
        is_right, known = length > 0, "others"
    else:
        is_right, known = length == expected, str(expected)
    if not is_right:
        shape = str(value.shape) if torch.jit.is_scripting() else str(tuple(value.shape))
        raise SpecializationError(
            f"dimension {dim} of {what}: the input has shape {shape}, the example had {known} there.{_size_hint(what)}"
        )


def _size_hint(what: str) -> str:
    if what.find("takes no other length") >= 0:  # a model that asserts a length does so in every trace
        return ""
    if what.find("a run at another length has failed") >= 0:
        return f" {_hint()}. adaptive=True helps only if the model takes the length of this input."
    return f" {_hint()}."


# For TorchScript: see `text_of_form`.
@torch.jit._overload
def check_form(value: tuple[torch.Tensor, torch.Tensor | None], form: Any, what: str) -> None: ...  # noqa: D103


@torch.jit._overload
def check_form(value: Any, form: Any, what: str) -> None: ...  # noqa: D103, F811


@runtime_check
def check_form(value: Any, form: Any, what: str) -> None:  # noqa: F811
    """Raise unless `value` is nested as on the example; `form` is what `form_of` gave then.

    Raises:
        SpecializationError: it is not; `what` names it.
    """
    if torch.jit.is_scripting():
        if text_of_form(value) != text_of_known_form(form):
            raise SpecializationError(f"the form of {what} is not what it was on the example. {_hint()}.")
    elif form_of(value) != form:
        raise SpecializationError(f"the form of {what}: {form_of(value)} now, {form} on the example. {_hint()}.")


@runtime_check
def check_result(value: Any, form: Any, what: str) -> None:
    """Raise unless the result of a call holds what it held for the example, apart from tensors.

    `form_of_result` describes that, for `form`.

    Raises:
        SpecializationError: it does not; `what` names it.
    """
    found = form_of_result(value)
    if found != form:
        now, then = _first_difference(found, form)
        raise SpecializationError(f"{what}: {_short(now)} now, {_short(then)} on the example. {_hint()}.")


@runtime_check
def check_array(value: Any, dtype: str, shape: tuple[int, ...], digest: str, what: str) -> None:
    """Raise unless `value` is an array of numpy that holds what the one of the example held.

    Raises:
        SpecializationError: it is not; `what` names it.
    """
    if not is_array(value) or description_of(value) != (dtype, shape, digest):
        raise SpecializationError(f"{what}: an array of numpy with other values than on the example. {_hint()}.")


@runtime_check
def check_aliases(values: tuple[Any, ...], expected: tuple[int, ...] | None, is_written: bool = False) -> None:
    """Raise unless the same inputs are one tensor as on the example.

    Args:
        values: the inputs.
        expected: what `aliases_of` gave for the example; None if all of its tensors were different ones.
        is_written: whether the model writes one of them, so that different ones may share no memory.

    Raises:
        SpecializationError: they are not, and the model may ask with `is`, or it writes one of them.
    """
    aliases = aliases_of(values)
    is_compiling = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if is_written and not is_compiling and overlap(_tensors_in(values, ())):
        raise SpecializationError(
            f"two inputs are views of the same memory, and the model writes one of them; pass copies. {_hint()}."
        )
    if aliases == (expected or tuple(range(len(aliases)))):
        return
    why = "the model writes one of them, or may compare them with `is`"
    if expected is None:
        what = f"one tensor is passed as two inputs, and {why}; pass a copy for one of them, or trace with such inputs"
    else:
        what = f"other inputs share one tensor than in the example, and {why}; pass one tensor for the same inputs"
    raise SpecializationError(f"{what}. {_hint()}.")


@runtime_check
def check_same_items(value: Any, expected: tuple[int, ...], what: str) -> None:
    """Raise unless the same items of a result are one tensor as on the example; `aliases_of` describes that.

    Raises:
        SpecializationError: they are not, so a write into one of them means something else; `what` names the result.
    """
    if aliases_of(value) != expected:
        raise SpecializationError(
            f"other items of {what} are one tensor than on the example, and forward may write one of them or compare "
            f"them with `is`. {_hint()}."
        )


def aliases_of(values: Any) -> tuple[int, ...]:
    """Return for each tensor in nested values and objects the position of the first one that is the same object.

    O(tensors ** 2): torch.compile knows no ids.
    """
    tensors = list(_tensors_in(values, ()))
    return tuple([_position_of(tensor, tensors) for tensor in tensors])


def _position_of(value: object, values: Sequence[object]) -> int:
    """Return the position of the first of `values` that is this object, or how many there are."""
    for position, each in enumerate(values):
        if each is value:
            return position
    return len(values)


def _tensors_in(value: Any, around: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str)):
        return
    held: list[Any] = []
    if isinstance(value, (tuple, list, dict)):
        items = cast(dict[Any, Any], value).values() if isinstance(value, dict) else cast(list[Any], value)
        held = [*items, *attributes_beside_items(value).values()]
    elif is_plain_object(value) or (is_dataclass(value) and not isinstance(value, type)):
        held = [*attributes_of(value).values()]
    elif isinstance(value, Mapping):
        held = [*cast(Mapping[Any, Any], value).values()]
    for item in held if _position_of(value, around) == len(around) else ():
        yield from _tensors_in(item, (*around, value))


def require_aliases(graph: "Graph", expected: tuple[int, ...] | None, *, is_written: bool) -> None:
    """Let `graph` call `check_aliases` first, unless its only input is a tensor. O(nodes)."""
    inputs = tuple(graph.find_nodes(op="placeholder"))
    if not inputs or (len(inputs) == 1 and "shape" in inputs[0].meta):
        return
    # Of a dict, those items that forward reads.
    inputs = tuple(next((user for user in node.users if user.target is items_at), node) for node in inputs)
    with graph.inserting_after(max(inputs)):
        add_check(graph, check_aliases, inputs, expected, *([True] if is_written else [])).meta["is_check_of_input"] = (
            True
        )


def add_check(graph: "Graph", function: Callable[..., None], *arguments: Any) -> "Node":
    """Add a call of one of these checks where nodes are inserted now, and return it."""
    check = graph.call_function(function, arguments)
    check.meta["is_guard"] = True
    return check


def require_mode(graph: "Graph", training: bool, reason: str, path: str = "") -> None:
    """Let `graph` check first that its module is in train mode, or in eval mode, unless it does so already. O(nodes).

    `reason` says why, and what to do in the other mode. With `path` it is the mode of the submodule there.
    """
    target = f"{path}.training" if path else "training"
    for read in graph.find_nodes(op="get_attr", target=target):
        if any(user.target is check_decision and user.args[1] is training for user in read.users):
            return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        mode = graph.get_attr(target)
        owner = f" of '{path}'" if path else ""
        add_check(graph, check_decision, mode, training, f"the train mode{owner} ({reason})")


def _is_same(value: Any, expected: Any) -> bool:
    if isinstance(value, torch.Tensor):  # torch.jit.trace makes tensors of sizes, and compares none with a bool
        return bool(value) is expected if isinstance(expected, bool) else bool(value == expected)
    if _are_truth_values(value, expected):
        return expected if value else not expected
    if isinstance(expected, float) and expected != expected:
        return bool(value != value)
    return bool(value == expected)


def _are_truth_values(value: Any, expected: Any) -> bool:
    """Say whether both are; torch.compile has symbolic ones, which it neither compares with a bool nor writes."""
    return isinstance(value, (bool, torch.SymBool)) and isinstance(expected, bool)


def _first_difference(one: Any, other: Any) -> tuple[Any, Any]:
    """Return the innermost parts of two forms that differ first, by their order."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):  # pyright: ignore[reportUnknownArgumentType]
        pairs = zip(cast(tuple[Any, ...], one), cast(tuple[Any, ...], other), strict=True)
        return next((_first_difference(*pair) for pair in pairs if pair[0] != pair[1]), (one, other))
    return one, other


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    text = "left out" if value is ... else " ".join(repr(value).split("\n"))
    return text if len(text) <= 80 else text[:77] + "..."
