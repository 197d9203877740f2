"""The examples of the seeds with an Interpreter, a Transformer or an interpreter of their own, and what they print.

featx stands in place of torch.fx. The shape propagation that the Chinese notebook writes by hand, and the decomposition
that retraces with proxies, are in the files beside this one; that of the library is here.
"""

# ruff: noqa: T201 - the notebooks print

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as the notebooks write it

import featx as fx


class LinearAndClamp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 5)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.linear(x).clamp(min=0.0, max=1.0)


def sigmoid_then_neg(x: Any) -> Any:
    return torch.sigmoid(x).neg()


def test_custom_transformer_replaces_add_by_mul(capsys: pytest.CaptureFixture[str]) -> None:
    class CustomTransformer(fx.Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            if target == torch.add:
                return self.call_function(torch.mul, args, kwargs)
            return super().call_function(target, args, kwargs)

    class M(torch.nn.Module):
        def forward(self, x, y):  # type: ignore[no-untyped-def]
            return torch.add(x, y)

    model = M()
    tracer = fx.Tracer()
    graph = tracer.trace(model)
    gm = fx.GraphModule(model, graph)
    transformed_gm = CustomTransformer(gm).transform()

    x, y = torch.tensor(2.0), torch.tensor(3.0)
    print(transformed_gm(x, y))
    assert capsys.readouterr().out == "tensor(6.)\n"
    assert gm(x, y) == 5, "the module that is transformed is as before"


def test_interpreter_swaps_sigmoid_and_neg() -> None:
    class NegSigmSwapInterpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            if target == torch.sigmoid:
                return torch.neg(*args, **kwargs)
            raise AssertionError(target)

        def call_method(self, target: Any, args: Any, kwargs: Any):
            if target == "neg":
                call_self, *args_tail = args
                return call_self.sigmoid(*args_tail, **kwargs)
            raise AssertionError(target)

    gm = fx.symbolic_trace(sigmoid_then_neg)
    input = torch.randn(3, 4)
    result = NegSigmSwapInterpreter(gm).run(input)
    torch.testing.assert_close(result, torch.neg(input).sigmoid())
    assert torch.equal(result, torch.neg(input).sigmoid())


def test_interpreter_calls_what_the_notebook_draws() -> None:
    drawn = {"run_node", "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"}
    called: set[str] = set()

    class Drawing(fx.Interpreter):
        def __getattribute__(self, name: str) -> Any:
            if name in drawn:
                called.add(name)
            return super().__getattribute__(name)

    class M(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.param = torch.nn.Parameter(torch.rand(3, 4))
            self.linear = torch.nn.Linear(4, 5)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.linear(x + self.param).clamp(min=0.0, max=1.0)

    Drawing(fx.symbolic_trace(M())).run(torch.rand(3, 4))
    assert called == drawn


def test_shape_propagation_by_a_subclass_prints_what_the_notebook_prints(capsys: pytest.CaptureFixture[str]) -> None:
    class ShapeProp(fx.Interpreter):
        def run_node(self, n: Any):
            result = super().run_node(n)
            n.meta["shape"], n.meta["dtype"] = result.shape, result.dtype
            return result

        def propagate(self, *args: Any) -> Any:
            return super().run(*args)

    traced_m = fx.symbolic_trace(LinearAndClamp())
    ShapeProp(traced_m).propagate(torch.randn(4))
    for node in traced_m.graph.nodes:
        print(node.name, node.meta["shape"], node.meta["dtype"])
    assert capsys.readouterr().out == (
        "x torch.Size([4]) torch.float32\n"
        "linear torch.Size([5]) torch.float32\n"
        "clamp torch.Size([5]) torch.float32\n"
        "output torch.Size([5]) torch.float32\n"
    )


def test_shape_propagation_of_the_library_prints_what_the_notebook_prints(capsys: pytest.CaptureFixture[str]) -> None:
    traced_m = fx.symbolic_trace(LinearAndClamp())
    fx.ShapeProp(traced_m).propagate(torch.randn(4))
    for node in traced_m.graph.nodes:
        print(node.name, node.meta["tensor_meta"].dtype, node.meta["tensor_meta"].shape)
    assert capsys.readouterr().out == (
        "x torch.float32 torch.Size([4])\n"
        "linear torch.float32 torch.Size([5])\n"
        "clamp torch.float32 torch.Size([5])\n"
        "output torch.float32 torch.Size([5])\n"
    )


def test_decomposition_of_relu_by_a_transformer(capsys: pytest.CaptureFixture[str]) -> None:
    decomposition_rules = {F.relu: lambda x: (x > 0) * x, torch.relu: lambda x: (x > 0) * x}

    class Decompose(fx.Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any):
            rule = decomposition_rules.get(target)
            return super().call_function(target, args, kwargs) if rule is None else rule(*args)

    class M(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return F.relu(x)

    print(Decompose(fx.symbolic_trace(M())).transform()(torch.tensor([-1.0, 0.0, 1.0])))
    assert capsys.readouterr().out == "tensor([-0., 0., 1.])\n"

    class AddTwo(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            x = torch.add(x, 2)
            return torch.relu(x)

    decomposed = Decompose(fx.symbolic_trace(AddTwo())).transform()
    print(decomposed.code, decomposed(torch.tensor([2])))
    assert capsys.readouterr().out == (
        "\n\n\n"
        "def forward(self, x):\n"
        "    add = torch.add(x, 2);  x = None\n"
        "    gt = add > 0\n"
        "    mul = gt * add;  gt = add = None\n"
        "    return mul\n"
        "     tensor([4])\n"
    )
