"""Small things that code written for torch.fx relies on, each compared with the torch.fx that is installed."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.fx.passes.infra import pass_manager as peer_passes

import featx.fx
from featx.fx.passes.infra import pass_manager as our_passes

LIBRARIES = (torch.fx, featx.fx)


def raised_by(call: Callable[[Any], Any], library: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is compared
        call(library)
    return caught.value


def use_of_unowned_module(fx: Any) -> Any:
    class Unowned(nn.Module):
        def forward(self, x: Any) -> Any:
            return others[0](x)

    others = [nn.Linear(2, 2)]
    return fx.symbolic_trace(Unowned())


def relu_in_place(x: Any) -> Any:
    return torch.relu_(x)


# What is done, and what stands in torch.fx's message.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "if": (
        lambda fx: fx.symbolic_trace(lambda x: 1 if x else 2),
        "symbolically traced variables cannot be used as inputs",
    ),
    "len": (lambda fx: fx.symbolic_trace(lambda x: len(x)), "'len' is not supported in symbolic tracing by default"),
    "loop": (lambda fx: fx.symbolic_trace(lambda x: [i for i in x]), "Proxy object cannot be iterated"),  # noqa: C416
    "int": (lambda fx: fx.symbolic_trace(lambda x: int(x)), ""),
    "index": (lambda fx: fx.symbolic_trace(lambda x: [1, 2][x]), ""),
    "key": (lambda fx: fx.symbolic_trace(lambda x: {x: 1}), ""),
    "set": (lambda fx: fx.symbolic_trace(lambda x: {x}), ""),
    "unowned module": (use_of_unowned_module, "module is not installed as a submodule"),
    "mutable": (lambda fx: trace_mutable(fx), "mutable operation"),
    "string as function": (lambda fx: fx.Graph().create_node("call_function", "foo"), ""),
    "string as function of a node": (lambda fx: fx.Node(fx.Graph(), "n", "call_function", "foo", (), {}), ""),
    "function as method": (lambda fx: fx.Node(fx.Graph(), "n", "call_method", torch.relu, (), {}), ""),
}


def trace_mutable(fx: Any) -> Any:
    tracer = fx.Tracer()
    tracer.check_mutable_operations = True
    return tracer.trace(relu_in_place)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_fx_refuses_is_refused_with_its_class_and_key_words(name: str) -> None:
    call, words = REFUSED[name]
    theirs, ours = raised_by(call, torch.fx), raised_by(call, featx.fx)
    builtin = next(kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins")
    assert isinstance(ours, builtin)
    assert words in str(theirs)
    assert words in str(ours)


def test_refused_target_takes_no_name() -> None:
    graph = featx.fx.Graph()
    raised_by(lambda _: graph.create_node("call_function", "foo"), None)
    assert graph.placeholder("foo").name == "foo"


def test_mutable_operations_are_an_option_of_every_tracer() -> None:
    for fx in LIBRARIES:
        assert fx.proxy.TracerBase.check_mutable_operations is False
        graph = fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(graph)
        tracer.check_mutable_operations = True
        x = fx.Proxy(graph.placeholder("x"), tracer)
        assert isinstance(raised_by(lambda _, x=x: torch.relu_(x), fx), RuntimeError)


def test_tracer_is_copied_before_and_after_a_trace() -> None:
    for fx in LIBRARIES:
        tracer = fx.Tracer(param_shapes_constant=True)
        assert copy.deepcopy(tracer).param_shapes_constant
        tracer.trace(nn.Sequential(nn.Linear(2, 2)))
        names = [node.name for node in copy.deepcopy(tracer).trace(nn.Sequential(nn.ReLU())).nodes]
        assert names == ["input_1", "_0", "output"]


def test_calls_of_the_profiler_are_not_dead() -> None:
    for fx in LIBRARIES:
        graph = fx.Graph()
        x = graph.placeholder("x")
        record = graph.call_function(torch.ops.profiler._record_function_enter_new, ("region", None))
        value = graph.call_function(torch.relu, (x,))
        graph.call_function(torch.ops.profiler._record_function_exit._RecordFunction, (record,))
        graph.output(value)
        assert not graph.eliminate_dead_code()
        assert len(graph.nodes) == 5


def test_function_is_a_concrete_argument() -> None:
    def apply(x: Any, function: Any) -> Any:
        return function(x) + 1

    for fx in LIBRARIES:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Was not able to add assertion")
            module = fx.symbolic_trace(apply, concrete_args={"function": torch.relu})
        x = torch.tensor([-1.0, 2.0])
        assert torch.equal(copy.deepcopy(module)(x, torch.relu), apply(x, torch.relu))
        assert [node.target for node in module.graph.nodes][-3:] == [torch.relu, operator.add, "output"]


def test_object_of_a_proxyable_class_is_a_constant() -> None:
    for fx in LIBRARIES:

        class Pair(metaclass=fx.ProxyableClassMeta):
            def __init__(self, left: Any, right: Any) -> None:
                self.left, self.right = left, right

        class Use(nn.Module):
            def forward(self, pair: Any, x: Any) -> Any:
                return pair.left * x + pair.right

        class Model(nn.Module):
            def __init__(self, pair: Any) -> None:
                super().__init__()
                self.use, self.held = Use(), [pair]

            def forward(self, x: Any) -> Any:
                return self.use(self.held[0], x)

        class Tracer(fx.Tracer):
            def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
                return module_qualified_name == "use"

        model = Model(Pair(torch.tensor(2.0), 3))
        module = fx.GraphModule(model, Tracer().trace(model))
        assert module(torch.tensor(5.0)).item() == 13.0


def test_read_of_what_is_not_there_warns() -> None:
    for fx in LIBRARIES:
        module = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
        with pytest.warns(UserWarning, match="no underlying reference"):
            module.graph.get_attr("nothere")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.graph.get_attr("0.weight")
            fx.Graph().get_attr("anything")


def test_line_of_a_node_has_the_shape_of_its_value_on_request() -> None:
    lines: list[list[str]] = []
    for fx in LIBRARIES:
        node = list(fx.symbolic_trace(lambda x: torch.relu(x)).graph.nodes)[1]
        lines.append([node.format_node(include_tensor_metadata=True)])
        for dtype in (torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.uint8, torch.float8_e4m3fn):
            node.meta["val"] = torch.empty(2, 3, dtype=dtype)
            lines[-1] += [node.format_node(include_tensor_metadata=True), node.format_node()]
    assert lines[0] == lines[1]


def test_pass_manager_has_steps_and_checks_its_check() -> None:
    for passes in (peer_passes, our_passes):
        manager = passes.PassManager
        assert (manager.steps, manager().steps, manager(steps=0).steps, manager(steps=3).steps) == (1, 1, 1, 3)
        with pytest.raises(TypeError, match="check"):
            manager().add_checks(lambda module, other: None)
        assert passes.pass_result_wrapper(None) is None
        assert passes.PassResult(nn.ReLU(), True).modified
