"""bind_inputs: a signature becomes placeholders, and concrete values are checked when the graph runs."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn

import featx

Rows = Callable[[Any], list[str]]
Pair = namedtuple("Pair", ["left", "right"])
X, Y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


class Mode(enum.Enum):
    SUM = 1
    PRODUCT = 2


def positional(x: Any, y: Any) -> Any:
    return x + y


def with_default(x: Any, scale: float = 2.0) -> Any:
    return x * scale


def keyword_only(x: Any, *, scale: float = 2.0, shift: Any) -> Any:
    return x * scale + shift


def positional_only(x: Any, /, y: Any) -> Any:
    return x + y


def rest(x: Any, *others: Any) -> Any:
    return x + others[0]


def keyword_rest(x: Any, **options: Any) -> Any:
    return x + options["y"]


def everything(x: Any, y: Any = 1, *others: Any, scale: Any = 2, **options: Any) -> Any:
    return (x + y + others[0]) * scale + options["shift"]


def annotated(x: torch.Tensor, flag: bool = False) -> torch.Tensor:
    return x + 1


CALLS: dict[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]] = {
    positional: ((X, Y), {}),
    with_default: ((X,), {}),
    keyword_only: ((X,), {"shift": Y}),
    positional_only: ((X, Y), {}),
    rest: ((X, Y), {}),
    keyword_rest: ((X,), {"y": Y}),
    everything: ((X, Y, X), {"shift": 3.0, "scale": 4}),
    annotated: ((X,), {}),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_signature_is_kept(function: Callable[..., Any]) -> None:
    args, kwargs = CALLS[function]
    traced = featx.symbolic_trace(function)
    assert torch.equal(traced(*args, **kwargs), function(*args, **kwargs))


@pytest.mark.parametrize(
    "function", [positional, with_default, rest, keyword_rest, annotated], ids=lambda function: function.__name__
)
def test_placeholders_are_those_of_torch_fx(function: Callable[..., Any], rows: Rows) -> None:
    assert rows(featx.symbolic_trace(function).graph) == rows(torch.fx.symbolic_trace(function).graph)


def test_default_holds_when_the_input_is_left_out_and_not_when_it_is_given() -> None:
    traced = featx.symbolic_trace(with_default)
    assert torch.equal(traced(X), X * 2)
    assert torch.equal(traced(X, 5.0), X * 5)
    assert torch.equal(traced(X, scale=Y), X * Y)


def test_keyword_only_input_cannot_be_given_by_position() -> None:
    traced = featx.symbolic_trace(keyword_only)
    with pytest.raises(TypeError):
        traced(X, 2.0, Y)


def test_mutable_default_is_not_shared_with_the_graph() -> None:
    def function(x: Any, sizes: Any = (1, 2)) -> Any:
        return x.view(sizes)

    assert featx.symbolic_trace(function)(X).shape == (1, 2)


def test_tensor_as_a_default_is_kept() -> None:
    weight = torch.tensor([2.0, 3.0])

    def function(x: Any, y: Any = weight) -> Any:
        return x * y

    traced = featx.symbolic_trace(function)
    assert torch.equal(traced(X), X * weight)
    assert torch.equal(traced(X, Y), X * Y)


def test_inputs_called_like_builtins_keep_their_names() -> None:
    def function(input: Any, max: Any, type: Any) -> Any:
        return input * max + type

    assert torch.equal(featx.symbolic_trace(function)(input=X, max=2, type=3), X * 2 + 3)


def test_annotations_of_inputs_are_kept_on_the_placeholders() -> None:
    def function(x: torch.Tensor, y: int, z: Any) -> Any:
        return x + y

    function.__annotations__ = {"x": torch.Tensor, "y": int}
    assert [node.type for node in featx.Tracer().trace(function).nodes][:3] == [torch.Tensor, int, None]


@pytest.mark.parametrize("wrapper", ["module", "bound method", "callable object", "lambda", "closure"])
def test_anything_with_a_python_signature_can_be_traced(wrapper: str) -> None:
    class Doubler(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    class Callable_:
        def __call__(self, x: Any) -> Any:
            return x * 2

        def method(self, x: Any) -> Any:
            return x * 2

    factor = 2
    roots: dict[str, Any] = {
        "module": Doubler(),
        "bound method": Callable_().method,
        "callable object": Callable_(),
        "lambda": lambda x: x * 2,
        "closure": lambda x: x * factor,
    }
    assert torch.equal(featx.symbolic_trace(roots[wrapper])(X), X * 2)


def test_method_with_rest_of_a_module_is_traced_on_its_instance() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Any, *others: Any, **options: Any) -> Any:
            return self.linear(x) + others[0]

    model = Model()
    assert torch.equal(featx.symbolic_trace(model)(X, Y), model(X, Y))


@pytest.mark.parametrize("root", [torch.relu, 3, None, "model"])
def test_root_that_cannot_be_traced_is_refused(root: Any) -> None:
    with pytest.raises(featx.TraceError):
        featx.symbolic_trace(root)


# -- concrete_args -----------------------------------------------------------------------------------------------------


def choose(x: Any, flag: Any, count: Any = 1) -> Any:
    if flag:
        for _ in range(count):
            x = x * 2
    return x


def test_concrete_values_decide_control_flow() -> None:
    traced = featx.symbolic_trace(choose, concrete_args={"flag": True, "count": 3})
    assert [node.name for node in traced.graph.nodes if node.name.startswith("mul")] == ["mul", "mul_1", "mul_2"]
    assert torch.equal(traced(X, True, 3), X * 8)


def test_input_with_a_concrete_value_has_the_nodes_of_torch_fx_and_keeps_its_own_name(rows: Rows) -> None:
    concrete = {"flag": False}
    ours = featx.Tracer().trace(choose, concrete)
    theirs = torch.fx.Tracer().trace(choose, concrete)
    # torch.fx renames the argument to flag_1.
    assert rows(ours) == [row.replace("= flag_1 ()", "= flag ()") for row in rows(theirs)]
    assert torch.equal(featx.GraphModule(nn.Module(), ours)(X, flag=False), X)


@pytest.mark.parametrize(("flag", "count"), [(False, 3), (True, 2)])
def test_another_value_when_the_graph_runs_raises(flag: bool, count: int) -> None:
    traced = featx.symbolic_trace(choose, concrete_args={"flag": True, "count": 3})
    with pytest.raises(AssertionError, match="specialized"):
        traced(X, flag, count)


def test_concrete_values_may_come_as_a_tuple_with_ph_for_open_inputs() -> None:
    traced = featx.symbolic_trace(choose, concrete_args=(featx.PH, True, 1))
    assert torch.equal(traced(X, True, 1), X * 2)


def test_tuple_of_another_length_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="3 inputs"):
        featx.symbolic_trace(choose, concrete_args=(featx.PH, True))


def test_concrete_value_for_an_unknown_input_is_refused() -> None:
    with pytest.raises(featx.TraceError, match=r"flags.*choose.*flag"):
        featx.symbolic_trace(choose, concrete_args={"flags": True})


def optional(x: Any, mask: Any = None) -> Any:
    if mask is None:
        return x
    return x * mask


def test_input_fixed_to_none_refuses_anything_else_when_it_runs() -> None:
    traced = featx.symbolic_trace(optional, concrete_args={"mask": None})
    assert torch.equal(traced(X), X)
    with pytest.raises(featx.TraceError, match=r"mask=None.*PH"):
        traced(X, Y)


def test_default_of_none_stays_open_as_in_torch_fx() -> None:
    assert torch.equal(featx.symbolic_trace(optional)(X, Y), X * Y)


class Fixing(featx.Tracer):
    specialize_options = True


def test_tracer_may_fix_defaults_of_none() -> None:
    traced = featx.GraphModule(nn.Module(), Fixing().trace(optional))
    assert torch.equal(traced(X), X)
    with pytest.raises(featx.TraceError):
        traced(X, Y)


def test_open_input_wins_over_a_fixed_default() -> None:
    traced = featx.GraphModule(nn.Module(), Fixing().trace(optional, {"mask": featx.PH}))
    assert torch.equal(traced(X, Y), X * Y)


@pytest.mark.parametrize(("default", "other"), [(True, False), ("sum", "mean")])
def test_tracer_may_fix_flags_and_strings_at_their_default(default: Any, other: Any) -> None:
    def function(x: Any, option: Any = default) -> Any:
        return x + 1 if option == default else x - 1

    traced = featx.GraphModule(nn.Module(), Fixing().trace(function))
    assert torch.equal(traced(X), X + 1)
    assert torch.equal(traced(X, default), X + 1)
    with pytest.raises(featx.TraceError, match="option"):
        traced(X, other)


def test_tracer_leaves_numbers_open() -> None:
    traced = featx.GraphModule(nn.Module(), Fixing().trace(with_default))
    assert torch.equal(traced(X, 7.0), X * 7)


def test_object_is_fixed_by_equality() -> None:
    def function(x: Any, mode: Mode) -> Any:
        return x + 1 if mode is Mode.SUM else x * 2

    traced = featx.symbolic_trace(function, concrete_args={"mode": Mode.SUM})
    assert torch.equal(traced(X, Mode.SUM), X + 1)
    with pytest.raises(featx.TraceError, match="PRODUCT"):
        traced(X, Mode.PRODUCT)


def test_tensor_as_a_concrete_value_is_refused() -> None:
    with pytest.raises(featx.ArgumentTypeError, match="buffer"):
        featx.symbolic_trace(optional, concrete_args={"mask": Y})


def nested(data: Any, scale: Any) -> Any:
    return data["a"] * scale + data["b"][0] * data["b"][1]


def test_ph_leaves_places_in_a_nested_value_open() -> None:
    concrete = {"data": {"a": featx.PH, "b": [featx.PH, 3.0]}}
    traced = featx.symbolic_trace(nested, concrete_args=concrete)
    assert torch.equal(traced({"a": X, "b": [Y, 3.0]}, 2.0), X * 2 + Y * 3)


@pytest.mark.parametrize(
    "data", [{"a": X, "b": [Y, 4.0]}, {"a": X, "b": [Y, 3.0, 1.0]}, {"a": X, "b": [Y, 3.0], "c": X}]
)
def test_nested_value_of_another_form_raises_when_it_runs(data: Any) -> None:
    concrete = {"data": {"a": featx.PH, "b": [featx.PH, 3.0]}}
    traced = featx.symbolic_trace(nested, concrete_args=concrete)
    with pytest.raises(AssertionError):
        traced(data, 2.0)


def test_concrete_args_are_not_changed() -> None:
    concrete = {"data": {"a": featx.PH, "b": [featx.PH, 3.0]}}
    featx.symbolic_trace(nested, concrete_args=concrete)
    assert concrete == {"data": {"a": featx.PH, "b": [featx.PH, 3.0]}}


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    last: Any
    rest: list[Any]


OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, [x + 1, (x,)]],
    "dict": lambda x: {"a": x, "b": {"c": [x + 1]}},
    "named tuple": lambda x: Pair(x, {"right": x + 1}),
    "dataclass": lambda x: Output(x, [x + 1, x]),
    "dataclass in a list": lambda x: [Output(x, [])],
    "dict of a class": lambda x: OrderedDict(b=x, a=[x + 1]),
    "constants": lambda x: (x, None, 3, "text", torch.float32),
    "nothing": lambda x: None,
    "input": lambda x: x,
    "slice of shape": lambda x: x.shape,
}


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if dataclasses.is_dataclass(one):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_output_has_the_structure_and_types_of_the_model(kind: str) -> None:
    function = OUTPUTS[kind]
    assert same(featx.symbolic_trace(function)(X), function(X))


def test_output_of_a_transformers_style_class_is_rebuilt() -> None:
    class ModelOutput(dict):  # type: ignore[type-arg]
        @property
        def last(self) -> Any:
            return self["last"]

    result = featx.symbolic_trace(lambda x: ModelOutput(last=x + 1))(X)
    assert type(result) is ModelOutput
    assert torch.equal(result.last, X + 1)


def test_return_annotation_is_kept_on_the_output() -> None:
    def function(x: Any) -> Any:
        return x

    function.__annotations__["return"] = torch.Tensor
    assert featx.Tracer().trace(function).output_node().type is torch.Tensor


def test_another_method_than_forward_can_be_traced() -> None:
    class Features(featx.Tracer):
        traced_func_name = "features"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def features(self, x: Any) -> Any:
            return self.linear(x) * 2

    model = Model()
    graph = Features().trace(model)
    assert torch.equal(featx.GraphModule(model, graph)(X), model.features(X))
