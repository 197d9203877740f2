"""Tracer: what subclasses override, and what its options and attributes say."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import Residual, Scaled
from torch import nn

import featx

Rows = Callable[[Any], list[str]]
X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def test_subclass_decides_which_modules_are_leaves() -> None:
    class Blocks(featx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return module_qualified_name == "block" or super().is_leaf_module(m, module_qualified_name)

    graph = Blocks().trace(Residual())
    assert graph.find_nodes(op="call_module", target="block")
    assert not graph.find_nodes(op="call_module", target="block.0")
    assert graph.find_nodes(op="call_module", target="blocks.0.linear")


def test_modules_of_torch_nn_may_be_traced_through() -> None:
    class Open(featx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return False

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.0))
    graph = Open().trace(model)
    assert not [node for node in graph.nodes if node.op == "call_module"]
    torch.testing.assert_close(featx.GraphModule(model, graph)(X), model(X), rtol=0, atol=0)


def test_subclass_sees_every_call_of_a_module() -> None:
    class Watching(featx.Tracer):
        def __init__(self) -> None:
            super().__init__()
            self.paths: list[str] = []

        def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self.paths.append(self.path_of_module(m))
            return super().call_module(m, forward, args, kwargs)

    tracer = Watching()
    tracer.trace(Residual())
    assert tracer.paths[:5] == ["block", "block.0", "block.1", "block.2", "block.2.linear"]


def test_subclass_may_answer_a_module_call_by_running_something_else() -> None:
    class Removing(featx.Tracer):
        def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return args[0] if isinstance(m, nn.ReLU) else super().call_module(m, forward, args, kwargs)

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graph = Removing().trace(model)
    torch.testing.assert_close(featx.GraphModule(model, graph)(X), model[0](X), rtol=0, atol=0)


def test_subclass_may_name_modules_otherwise() -> None:
    class Prefixed(featx.Tracer):
        def path_of_module(self, mod: nn.Module) -> str:
            return f"root.{super().path_of_module(mod)}"

    graph = Prefixed().trace(nn.Sequential(nn.Linear(4, 4)))
    assert graph.find_nodes(op="call_module", target="root.0")


def test_module_that_the_root_does_not_own_has_no_path() -> None:
    class Asking(featx.Tracer):
        def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return self.path_of_module(nn.ReLU())

    with pytest.raises(featx.ModulePathError, match=r"ReLU.*not registered"):
        Asking().trace(nn.Sequential(nn.Linear(4, 4)))


def test_subclass_may_answer_reads_of_parameters() -> None:
    class Frozen(featx.Tracer):
        def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
            reads.append(attr)
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    reads: list[str] = []
    Frozen().trace(Scaled())
    assert reads.count("weight") == 2


def test_subclass_may_turn_its_own_types_into_arguments() -> None:
    class Meters:
        def __init__(self, value: float) -> None:
            self.value = value

    class Converting(featx.Tracer):
        def create_arg(self, a: Any) -> Any:
            return a.value if isinstance(a, Meters) else super().create_arg(a)

    graph = Converting().trace(lambda x: x.mul(Meters(3.0)))
    assert torch.equal(featx.GraphModule(nn.Module(), graph)(X), X * 3)


def test_subclass_may_change_each_recorded_call() -> None:
    class Renaming(featx.Tracer):
        def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
            target = torch.sub if target is torch.add else target
            return super().create_proxy(kind, target, args, kwargs, *rest, **options)

    graph = Renaming().trace(lambda x: torch.add(x, 1))
    assert torch.equal(featx.GraphModule(nn.Module(), graph)(X), X - 1)


def test_subclass_may_answer_truth_iteration_and_keys() -> None:
    class Answering(featx.Tracer):
        def to_bool(self, obj: featx.Proxy) -> bool:
            return False

        def iter(self, obj: featx.Proxy) -> Iterator[Any]:
            return iter([obj[0], obj[1]])

        def keys(self, obj: featx.Proxy) -> Any:
            return ["alpha"]

    def function(x: Any, options: Any) -> Any:
        total = torch.add(*[row for row in x], **options)  # noqa: C416 - the loop is what is asked
        return total if x.sum() > 0 else -total

    graph = Answering().trace(function)
    result = featx.GraphModule(nn.Module(), graph)(X, {"alpha": 2})
    torch.testing.assert_close(result, -(X[0] + 2 * X[1]))


def test_tracer_serves_one_trace_after_another(rows: Rows) -> None:
    tracer = featx.Tracer()
    first = rows(tracer.trace(Scaled()))
    tracer.trace(Residual())
    assert rows(tracer.trace(Scaled())) == first


def test_tracer_knows_root_and_graph_after_the_trace_as_those_of_torch_fx_do() -> None:
    model, tracer = Scaled(), featx.Tracer()
    graph = tracer.trace(model)
    assert tracer.root is model
    assert tracer.graph is graph
    assert graph.tracer_cls is featx.Tracer


def test_constant_shapes_of_parameters_are_plain_numbers() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.weight.shape[0] > self.weight.size(1):
                return x @ self.weight
            return x

    with pytest.raises(featx.ControlFlowError):
        featx.Tracer().trace(Sized())
    model = Sized()
    graph = featx.Tracer(param_shapes_constant=True).trace(model)
    torch.testing.assert_close(featx.GraphModule(model, graph)(X), model(X), rtol=0, atol=0)


def test_buffers_are_proxies_where_the_tracer_says_so() -> None:
    class Buffers(featx.Tracer):
        proxy_buffer_attributes = True

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.scale + 1)

    model = Counting()
    graph = Buffers().trace(model)
    assert [node.op for node in graph.nodes] == ["placeholder", "get_attr", "call_function", "call_function", "output"]
    torch.testing.assert_close(featx.GraphModule(model, graph)(X), model(X), rtol=0, atol=0)


def test_lines_of_the_model_are_recorded_where_the_tracer_says_so() -> None:
    class Recording(featx.Tracer):
        record_stack_traces = True

    add = Recording().trace(lambda x: x + 1).find_nodes(op="call_function", target=operator.add)[0]
    assert __file__ in (add.stack_trace or "")


# -- what code bases read from a tracer --------------------------------------------------------------------------------


def test_mutable_operations_are_refused_where_the_tracer_says_so() -> None:
    class Strict(featx.Tracer):
        check_mutable_operations = True

    for function in (lambda x: torch.relu_(x), lambda x: x.add_(1), lambda x: torch.add(x, 1, out=x)):
        featx.Tracer().trace(function)
        with pytest.raises(featx.TraceError, match="writes one of its arguments"):
            Strict().trace(function)
    Strict().trace(lambda x: torch.add(x.view(-1), 1))


def test_scopes_of_nodes_are_those_of_the_last_trace() -> None:
    tracer = featx.Tracer()
    tracer.trace(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()))
    assert tracer.node_name_to_scope["_0_0"] == ("0.0", nn.Linear)
    assert tracer.node_name_to_scope["input_1"] == ("", None)
    tracer.trace(lambda x: x + 1)
    assert list(tracer.node_name_to_scope) == ["x", "add", "output"]


def test_modules_that_run_are_on_the_stack() -> None:
    seen: list[list[str]] = []

    class Looking(featx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            seen.append(list(self.module_stack))
            return super().is_leaf_module(m, module_qualified_name)

    Looking().trace(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU()))
    assert seen == [["0"], ["0", "0.0"], ["1"]]
