"""wrap and autowrap: calls of chosen functions become one node each, and nothing else notices."""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from math import sqrt
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import pytest
import torch
import torch.fx
from torch import nn

import featx
from featx.tracing.file_globals.wrapping import find_names_to_replace

X = torch.ones(4, 3)

featx.wrap("len")
featx.wrap(index)


@featx.wrap
def decide(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Depends on the value of its input, so it cannot be traced through."""
    return x * scale if bool(x.sum() > 0) else x - scale


def plain_decide(x: torch.Tensor) -> torch.Tensor:
    return x if bool(x.sum() > 0) else -x


def calls(root: Any, **options: Any) -> list[str]:
    graph = featx.Tracer(**options).trace(root)
    return [getattr(node.target, "__name__", node.target) for node in graph.nodes if node.op.startswith("call")]


def test_decorated_function_is_one_node() -> None:
    traced = featx.symbolic_trace(lambda x: decide(x + 1, scale=2.0))
    assert [node.name for node in traced.graph.nodes] == ["x", "add", "decide", "output"]
    assert torch.equal(traced(X), decide(X + 1, 2.0))
    assert torch.equal(traced(-5 * X), decide(-5 * X + 1, 2.0))


def test_wrapped_target_is_the_function_itself() -> None:
    node = featx.symbolic_trace(lambda x: decide(x)).graph.find_nodes(op="call_function", target=decide)
    assert len(node) == 1
    assert node[0].meta["is_wrapped"] is True


def test_wrap_returns_its_argument() -> None:
    assert featx.wrap(plain_decide_too) is plain_decide_too


def plain_decide_too(x: torch.Tensor) -> torch.Tensor:
    return plain_decide(x)


def test_call_without_traced_arguments_runs_during_the_trace() -> None:
    def function(x: Any) -> Any:
        return x * decide(torch.ones(1), 3.0)

    assert calls(function) == ["mul"]


def test_traced_value_deep_in_the_arguments_is_found() -> None:
    def function(x: Any) -> Any:
        return length_of({"items": [x, (x, 1)]})

    traced = featx.symbolic_trace(function)
    assert traced(X) == 2


@featx.wrap
def length_of(values: Any) -> int:
    return sum(1 for _ in values["items"])


def test_builtin_is_wrapped_by_name_in_the_module_that_asked() -> None:
    traced = featx.symbolic_trace(lambda x: x + len(x))
    assert traced.graph.find_nodes(op="call_function", target=len)
    assert torch.equal(traced(X), X + 4)
    assert torch.equal(traced(X[:2]), X[:2] + 2)


def test_function_written_in_c_is_wrapped_under_its_name_here() -> None:
    traced = featx.symbolic_trace(lambda x: x + index(x.shape[0]))
    assert torch.equal(traced(X[:2]), X[:2] + 2)


def test_builtin_is_itself_again_after_the_trace() -> None:
    featx.symbolic_trace(lambda x: x + len(x))
    assert "len" not in globals()
    assert len([1]) == 1


def test_global_function_is_itself_again_after_a_failing_trace() -> None:
    def function(x: Any) -> Any:
        return 1 if decide(x) else 2

    before = globals()["decide"]
    with pytest.raises(featx.ControlFlowError):
        featx.symbolic_trace(function)
    assert globals()["decide"] is before
    assert "len" not in globals()


def test_wrap_by_name_below_the_top_level_is_refused() -> None:
    with pytest.raises(featx.TraceError, match="top level"):
        featx.wrap("sum")


@pytest.mark.parametrize("value", [3, None, [math.sqrt]])
def test_wrap_of_something_that_is_no_function_is_refused(value: Any) -> None:
    with pytest.raises(featx.ArgumentTypeError, match="function or the name"):
        featx.wrap(value)


def test_functions_of_math_are_wrapped_by_default() -> None:
    traced = featx.symbolic_trace(lambda x: x * math.sqrt(x.shape[1]))
    assert len(traced.graph.find_nodes(op="call_function", target=math.sqrt)) == 1
    assert torch.equal(traced(X), X * math.sqrt(3))
    assert torch.equal(traced(X[:, :2]), X[:, :2] * math.sqrt(2))


def test_function_of_math_that_was_imported_by_name_is_wrapped() -> None:
    traced = featx.symbolic_trace(lambda x: x * sqrt(x.shape[1]))
    assert torch.equal(traced(X[:, :2]), X[:, :2] * math.sqrt(2))


def test_math_imported_inside_forward_is_wrapped() -> None:
    namespace: dict[str, Any] = {}
    exec("def function(x):\n    import math\n    return x * math.sqrt(x.shape[1])", namespace)
    traced = featx.symbolic_trace(namespace["function"])
    assert torch.equal(traced(X[:, :2]), X[:, :2] * math.sqrt(2))


def test_math_is_not_wrapped_where_the_tracer_is_told_so() -> None:
    with pytest.raises(featx.ControlFlowError, match=r"math\.sqrt"):
        featx.Tracer(autowrap_modules=()).trace(lambda x: x * math.sqrt(x.shape[1]))


def test_math_is_as_before_after_a_trace() -> None:
    before = dict(math.__dict__)
    featx.symbolic_trace(lambda x: x * math.sqrt(x.shape[1]))
    assert math.__dict__ == before


def test_autowrapped_function_is_one_node() -> None:
    assert calls(lambda x: plain_decide(x), autowrap_functions=(plain_decide,)) == ["plain_decide"]


class CallsGlobal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return plain_decide(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CallsGlobal()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_autowrapped_function_is_found_in_the_globals_of_submodules() -> None:
    assert calls(Outer(), autowrap_functions=(plain_decide,)) == ["plain_decide"]


@pytest.fixture
def library() -> Iterator[ModuleType]:
    """A Python module of its own, with functions that nothing marked."""
    module = ModuleType("a_library_of_the_test")
    source = (
        "def public(x):\n    return x if x.sum() > 0 else -x\n\n"
        "def _private(x):\n    return x + 1\n\n"
        "def calls_public(x):\n    return public(x) * 2\n"
    )
    exec(source, module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_public_functions_of_autowrapped_modules_are_one_node_each(library: ModuleType) -> None:
    assert calls(lambda x: library.public(library._private(x)), autowrap_modules=(library,)) == ["add", "public"]


def test_function_marked_for_torch_fx_is_honoured(library: ModuleType) -> None:
    exec("import torch.fx\ntorch.fx.wrap('public')", library.__dict__)
    try:
        assert calls(lambda x: library.calls_public(x)) == ["public", "mul"]
    finally:
        torch.fx._symbolic_trace._wrapped_fns_to_patch.pop((id(library.__dict__), "public"))


def test_functions_that_torchvision_marked_for_torch_fx_are_one_node() -> None:
    swin = pytest.importorskip("torchvision.models.swin_transformer")
    with torch.device("meta"):
        attention = swin.ShiftedWindowAttention(8, [2, 2], [1, 1], 2)
    assert "shifted_window_attention" in calls(attention)


def test_other_threads_pass_through_wrapped_functions() -> None:
    results: list[Any] = []

    def function(x: Any) -> Any:
        other = threading.Thread(target=lambda: results.append((decide(X, 2.0), math.sqrt(4), len([1, 2]))))
        other.start()
        other.join()
        return decide(x)

    featx.symbolic_trace(function)
    value, root, length = results[0]
    assert torch.equal(value, X * 2)
    assert (root, length) == (2.0, 2)


def test_pass_through_looks_like_the_function() -> None:
    seen: list[Callable[..., Any]] = []

    def function(x: Any) -> Any:
        seen.append(globals()["decide"])
        return decide(x)

    featx.symbolic_trace(function)
    assert seen[0] is not decide
    assert seen[0].__name__ == "decide"


def test_trace_inside_a_trace_keeps_functions_wrapped_until_both_are_done() -> None:
    def function(x: Any) -> Any:
        featx.symbolic_trace(lambda y: decide(y))
        return decide(x)

    assert calls(function) == ["decide"]
    assert type(globals()["decide"]) is type(calls)


class Tripled(torch.autograd.Function):
    """Doubles; its gradient is not that of doubling."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 3


def through_a_function(x: torch.Tensor) -> torch.Tensor:
    return Tripled.apply(x) + 1


tripled: Callable[[Any], Any] = Tripled.apply


@pytest.mark.parametrize("root", [through_a_function, lambda x: through_a_function(x), lambda x: tripled(x) + 1])
def test_autograd_function_is_one_node_and_keeps_its_backward(root: Callable[[Any], Any]) -> None:
    traced = featx.symbolic_trace(root)
    x = torch.ones(3, requires_grad=True)
    traced(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0, 3.0]
    assert [node.target for node in traced.graph.nodes][1] == Tripled.apply
    assert issubclass(Tripled, torch.autograd.Function)


def test_scripted_function_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns((FutureWarning, DeprecationWarning)):
        scripted = torch.jit.script(plain_decide)
    monkeypatch.setitem(globals(), "scripted", scripted)
    traced = featx.symbolic_trace(lambda x: globals()["scripted"](x) + 1)
    assert [node.name for node in traced.graph.nodes] == ["x", "plain_decide", "add", "output"]
    assert torch.equal(traced(-X), X + 1)


@pytest.mark.parametrize("call", [lambda x: torch.Tensor.add(x, 1), lambda x: torch.func.vmap(torch.sin)(x)])
def test_call_that_cannot_take_a_proxy_is_refused_with_its_line(call: Callable[[Any], Any]) -> None:
    with pytest.raises(featx.ControlFlowError, match=r"needs a tensor .* at .*test_wrapping.py:\d+.*To go on"):
        featx.symbolic_trace(call)


class NamesTyping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # What it imports makes classes by `type.__new__` in typing's own code.
        return x + len(TypedDict("Fields", {"a": int}).__annotations__)


def test_modules_of_python_itself_are_left_alone() -> None:
    seen = find_names_to_replace([NamesTyping.forward.__globals__], (), (), is_recording=True)
    assert not any(namespace.get("__name__") == "typing" for namespace, _ in seen)
    model, x = nn.Sequential(NamesTyping()), torch.rand(2)
    assert torch.equal(featx.trace(model, x)(x), model(x))


LIBRARY = """
import torch


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.slope = slope
        return (x > 0).float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.slope, None


def step(x):
    return Step.apply(x, 2.0)


def with_slope(slope):
    return lambda x: Step.apply(x, slope)
"""


@pytest.mark.parametrize("way", ["function of a module", "function held", "class of a module"])
def test_autograd_functions_of_a_library_are_found(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps_of_a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    steps = importlib.import_module("steps_of_a_library")
    monkeypatch.setitem(globals(), "steps_of_a_library", steps)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.held = nn.Linear(4, 4), steps.with_slope(2.0) if way == "function held" else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            if self.held is not None:
                return self.held(x)
            library: Any = steps_of_a_library  # type: ignore[name-defined]  # noqa: F821
            return library.step(x) if way == "function of a module" else library.Step.apply(x, 2.0)

    model, x = Net(), torch.rand(2, 4)
    extractor = featx.create_feature_extractor(model, ["layer", "output"], example_inputs=x)
    expected = torch.autograd.grad(model(x).sum(), model.layer.weight)[0]
    assert torch.equal(torch.autograd.grad(extractor(x)["output"].sum(), model.layer.weight)[0], expected)
