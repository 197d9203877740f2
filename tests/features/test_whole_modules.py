"""A module that no wanted value lies inside stays the model's own: its class, hooks, mode and control flow."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import image, run, same
from torch import nn

import featx
from featx.tracing.guards.guards import check_is_tensor

Capture = Callable[..., dict[str, list[Any]]]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = x * 2 if x.shape[0] > 3 and float(x.detach().sum()) > 0 else x + 1
        for _ in range(x.shape[0] % 3):
            x = self.drop(x)
        return x - 1 if self.training else x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.blocks = nn.Sequential(Inner(), Inner())
        self.last = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(torch.relu(self.first(x))))


def extractor_of(model: nn.Module, names: list[str] | None = None) -> Any:  # Any: its submodules are read below
    return featx.create_feature_extractor(model, names or ["blocks", "relu"], example_inputs=image())


# -- class -------------------------------------------------------------------------------------------------------------


def test_module_that_nothing_is_asked_of_is_the_models_own_and_stays_alive() -> None:
    model = Outer().eval()
    extractor = extractor_of(model)
    assert extractor.blocks is model.blocks
    assert extractor.first is model.first
    assert not hasattr(extractor, "last")
    calls: list[int] = []
    model.blocks[1].register_forward_hook(lambda *_: calls.append(1))
    for batch in (2, 5):
        x = image(batch)
        hidden = torch.relu(model.first(x))
        expected = {"blocks": model.blocks(hidden), "relu": hidden}
        calls.clear()
        assert same(extractor(x), expected)
        assert calls == [1]


def test_class_of_a_whole_module_keeps_its_methods_and_what_is_set_on_it_later() -> None:
    model = Outer().eval()
    extractor = extractor_of(model)
    assert type(extractor.first) is Inner
    assert isinstance(extractor.blocks[0], Inner)
    model.first.linear = nn.Linear(4, 4)
    model.blocks[0].forward = lambda x: x * 7
    hidden = torch.relu(model.first(image()))
    assert same(extractor(image())["blocks"], model.blocks[1](hidden * 7))


def test_copy_of_an_extractor_has_whole_modules_of_its_own() -> None:
    model = Outer().eval()
    extractor = extractor_of(model)
    duplicate = copy.deepcopy(extractor)
    assert type(duplicate.first) is Inner
    assert duplicate.first is not model.first
    assert same(duplicate(image(5)), extractor(image(5)))


@pytest.mark.slow
def test_extractor_keeps_the_residual_layer_of_a_resnet_whole() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18().eval()
    extractor = featx.create_feature_extractor(model, ["layer4"], example_inputs=torch.rand(2, 3, 32, 32))
    assert extractor.layer4 is model.layer4
    found: list[torch.Tensor] = []
    model.layer4.register_forward_hook(lambda module, args, output: found.append(output))
    x = torch.rand(2, 3, 64, 64)
    model(x)
    assert torch.equal(extractor(x)["layer4"], found[0])


# -- control flow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 9])
def test_control_flow_of_a_whole_module_decides_anew_for_each_input(
    batch: int, training: bool, capture: Capture
) -> None:
    model = Outer().train(training)
    extractor = extractor_of(model)
    for seed in (0, 1, 2):
        expected = capture(model, ["blocks"], image(batch, seed=seed))
        assert same(run(extractor, image(batch, seed=seed))["blocks"], expected["blocks"][0])


# -- mode --------------------------------------------------------------------------------------------------------------


def test_whole_module_follows_the_mode_of_the_extractor(capture: Capture) -> None:
    model = Outer().train()
    extractor = extractor_of(model)
    for training in (False, True, False):
        extractor.train(training)
        assert model.first.training is training
        expected = capture(copy.deepcopy(model).train(training), ["blocks"], image(4))
        assert same(run(extractor, image(4))["blocks"], expected["blocks"][0])


def test_one_whole_module_in_another_mode_than_the_rest_computes_in_its_own(capture: Capture) -> None:
    model = Outer().train()
    extractor = extractor_of(model)
    model.blocks[0].eval()
    expected = capture(model, ["blocks"], image(4))
    assert same(run(extractor, image(4))["blocks"], expected["blocks"][0])
    assert not same(run(extractor, image(4)), run(extractor.eval(), image(4)))


# -- hooks -------------------------------------------------------------------------------------------------------------


def test_hook_does_not_run_in_the_trace_and_runs_in_the_extractor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    calls: list[int] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(1) or output * 2)
    extractor = featx.create_feature_extractor(model, ["0", "1"], example_inputs=image())
    assert calls == []
    result = extractor(image())
    assert calls == [1]
    assert same(result["1"], model(image()))


def forward_hook(module: nn.Module, calls: list[str]) -> Any:
    return module.register_forward_hook(lambda _, args, output: calls.append("after") or output * 3)


def keyword_hook(module: nn.Module, calls: list[str]) -> Any:
    return module.register_forward_hook(
        lambda _, args, kwargs, output: calls.append("after") or output + len(args), with_kwargs=True
    )


def early_hook(module: nn.Module, calls: list[str]) -> Any:
    return module.register_forward_pre_hook(lambda _, args: calls.append("before") or (args[0] * 3,))


def gradient_hook(module: nn.Module, calls: list[str]) -> Any:
    return module.register_full_backward_hook(
        lambda _, inputs, outputs: calls.append("gradient") or tuple(gradient * 3 for gradient in inputs)
    )


@pytest.mark.parametrize("is_early", [True, False], ids=["before the trace", "after it"])
@pytest.mark.parametrize("path", ["first", "first.linear", "blocks.1"])
@pytest.mark.parametrize("add", [forward_hook, keyword_hook, early_hook, gradient_hook])
def test_hook_of_a_whole_module_runs_once_and_changes_what_it_changes_in_the_model(
    add: Callable[[nn.Module, list[str]], Any], path: str, is_early: bool
) -> None:
    model, calls = Outer().eval(), list[str]()
    hook = add(model.get_submodule(path), calls) if is_early else None
    extractor = extractor_of(model, ["blocks"])
    hook = hook or add(model.get_submodule(path), calls)
    assert calls == []
    outcomes: list[Any] = []
    for compute in (lambda x: extractor(x)["blocks"], lambda x: model.blocks(torch.relu(model.first(x)))):
        model.zero_grad()
        x = image(4).requires_grad_()
        result = compute(x)
        result.square().sum().backward()
        weights = [weight.grad.clone() for weight in model.first.parameters()]
        outcomes.append((result, x.grad, weights, list(calls)))
        calls.clear()
    assert same(*outcomes)
    assert len(outcomes[0][-1]) == 1
    hook.remove()
    assert same(extractor(image(4))["blocks"], model.blocks(torch.relu(model.first(image(4)))))
    assert calls == []


def test_hook_of_all_modules_sees_those_that_stay_whole() -> None:
    model, seen = Outer().eval(), list[type]()
    extractor = extractor_of(model, ["blocks"])
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    try:
        extractor(image(4))
    finally:
        hook.remove()
    assert seen.count(Inner) == 3
    assert seen.count(nn.Linear) == 3


def test_hook_that_changes_the_form_of_a_result_is_refused_where_the_trace_did_not_see_it() -> None:
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = self.first(x)
            return one + other

    model = Summing().eval()
    model.first.register_forward_hook(lambda _, args, output: (output, output * 2))
    extractor = featx.create_feature_extractor(model, ["add"], example_inputs=image())
    with pytest.raises(featx.SpecializationError, match="what 'first' returns"):
        extractor(image())


class BreaksOff(nn.Module):
    """Does something in the middle that no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y * float(y.detach().numpy().max())


def test_end_of_a_module_is_not_what_was_there_when_the_trace_broke_off_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 4), BreaksOff(), nn.Linear(4, 4))
    with pytest.raises(featx.TraceError, match="numpy"):
        featx.create_feature_extractor(model, ["1", "1.inner"], example_inputs=torch.randn(2, 4))
    extractor = featx.create_feature_extractor(model, ["1.inner"], example_inputs=torch.randn(2, 4))
    x = torch.randn(3, 4)
    assert torch.equal(extractor(x)["1.inner"], model[1].inner(model[0](x)))  # pyright: ignore[reportCallIssue]


class Memory:
    """What a model makes anew in each call and hands on; no literal of a graph."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
        memory.kept.append(self.linear(x))
        return torch.stack(memory.kept).sum(0)


class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Remembering(), Remembering()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = Memory()
        return self.two(self.one(x, memory) + 1, memory) * 2


def test_module_that_is_given_what_no_graph_holds_is_opened() -> None:
    torch.manual_seed(0)
    model = HandsOn()
    extractor = featx.create_feature_extractor(model, ["one", "two", "mul"], example_inputs=torch.randn(2, 4))
    x = torch.randn(5, 4)
    seen: dict[str, torch.Tensor] = {}
    for name in ("one", "two"):
        getattr(model, name).register_forward_hook(lambda module, args, output, name=name: seen.update({name: output}))
    expected = model(x)
    assert same(extractor(x), {**seen, "mul": expected})


class LargeRows(nn.Module):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [row for row in x if row.sum() > 2]


class OverRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.linear, self.last = LargeRows(), nn.Linear(4, 4), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(sum((self.linear(row) for row in self.rows(x)), torch.zeros(4)))


@pytest.mark.slow
def test_number_of_values_that_a_whole_module_returns_is_checked() -> None:
    torch.manual_seed(0)
    model = OverRows()
    one = torch.full((3, 4), 0.1)
    one[0] = 0.9
    extractor = featx.create_feature_extractor(model, ["last"], example_inputs=one)
    assert torch.equal(extractor(one)["last"], model(one))
    with pytest.raises(featx.SpecializationError, match="the form of what 'rows' returns"):
        extractor(torch.full((3, 4), 0.9))


@dataclasses.dataclass
class Returned:
    value: torch.Tensor


class ReturnsItsInputAtFirst(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(1))
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        if self.calls > 2:
            x = x * 2
        self.calls += 1
        return self.wrap(x)


class ReadsItsInputBehind(nn.Module):
    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.block, self.relu = nn.Identity(), ReturnsItsInputAtFirst(wrap), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.block(x)
        return self.relu(x)


@pytest.mark.parametrize(
    "wrap", [lambda x: (x, None), lambda x: {"x": x}, Returned], ids=["tuple", "dict", "dataclass"]
)
def test_input_that_a_module_returns_inside_of_something_stays_what_it_was(wrap: Callable[[torch.Tensor], Any]) -> None:
    model = ReadsItsInputBehind(wrap).eval()
    extractor = featx.create_feature_extractor(model, ["block", "relu"], example_inputs=torch.randn(2, 3))
    for _ in range(4):
        x = torch.randn(2, 3)
        assert torch.equal(extractor(x.clone())["relu"], torch.relu(x))


# -- writes that the example did not bring about -----------------------------------------------------------------------


class WritesLargeInputs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) > 100:
            x[:, 0] = 0
        return x * 2


class WritesInAMethod(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().sum()) > 100:
            self.clear(x)
        return x * 2

    def clear(self, rows: torch.Tensor) -> None:
        rows.t()[0].zero_()


class HasALayerThatWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(x) if float(x.detach().sum()) > 100 else x * 2


class HasAPartThatWrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(WritesAlways())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) if float(x.detach().sum()) > 100 else x * 2


class WritesAlways(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.sum()) > 100:
            x[:, 0] = 0
        return x * 2


class AroundTheWriter(nn.Module):
    """Reads its value `linear` again after a module that may have written it."""

    def __init__(self, writer: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        nn.init.eye_(self.linear.weight)
        self.writer = writer
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.writer(x) + self.head(x)


WRITERS = [WritesLargeInputs, WritesInAMethod, HasALayerThatWrites, HasAPartThatWrites]


@pytest.mark.parametrize("names", [["linear", "head"], ["head"], ["linear", "add"]])
@pytest.mark.parametrize("kind", [*WRITERS, Scripted])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_write_that_the_example_did_not_bring_about_is_reckoned_with(
    kind: type[nn.Module], names: list[str], capture: Capture
) -> None:
    writer = torch.jit.script(kind()) if kind is Scripted else kind()
    model = AroundTheWriter(writer).eval()
    extractor = featx.create_feature_extractor(model, names, example_inputs=torch.zeros(2, 3))
    for x in (torch.randn(2, 3), torch.tensor([[1000.0, -5.0, 1.0]]), torch.full((2, 3), -1000.0)):
        hooked = capture(model, ["linear", "head"], x.clone())
        expected = {"linear": hooked["linear"][0], "head": hooked["head"][0], "add": model(x.clone())}
        found = extractor(x.clone())
        assert all(torch.equal(found[name], expected[name]) for name in names)


@pytest.mark.parametrize("kind", WRITERS)
def test_module_that_writes_sometimes_stays_only_where_its_input_is_read_behind_it(kind: type[nn.Module]) -> None:
    model = AroundTheWriter(kind()).eval()
    extractor = featx.create_feature_extractor(model, ["linear"], example_inputs=torch.zeros(2, 3))
    assert [node.target for node in extractor.graph.find_nodes(op="call_module")] == ["linear"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "swin_t", "swin_v2_t", "convnext_tiny"])
def test_module_whose_writes_all_came_to_pass_costs_no_copy(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    model = getattr(torchvision.models, name)().eval()
    paths = [path for path in ("layer2", "layer4", "features.3", "features.5") if path in dict(model.named_modules())]
    assert "clone" not in featx.create_feature_extractor(model, paths).code


class ReturnsSmallInputs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pick(x) if x.shape[0] > 1 else x

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.detach().sum()) < 100 else x


class WritesBehindTheReturner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.block = ReturnsSmallInputs()
        self.head = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        y = self.block(x)
        y += 1
        return self.head(x)


@pytest.mark.parametrize("names", [["linear", "head"], ["head"]])
def test_input_that_a_module_returns_sometimes_is_reckoned_with(names: list[str], capture: Capture) -> None:
    model = WritesBehindTheReturner().eval()
    extractor = featx.create_feature_extractor(model, names, example_inputs=torch.zeros(2, 3))
    for x in (torch.randn(2, 3), torch.randn(1, 3), torch.full((2, 3), 1000.0), torch.full((2, 3), -1000.0)):
        hooked, found = capture(model, names, x.clone()), extractor(x.clone())
        assert all(torch.equal(found[name], hooked[name][0]) for name in names)


class WithBackbone(nn.Module):
    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Conv2d(4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x)["0"])


def test_an_extractor_in_a_model_is_one_node_of_a_symbolic_trace() -> None:
    x = torch.rand(2, 3, 8, 8)
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    model = WithBackbone(featx.create_feature_extractor(inner, {"0": "0"}, example_inputs=x)).eval()
    gm = featx.symbolic_trace(model)
    assert [node.target for node in gm.graph.find_nodes(op="call_module")] == ["backbone", "head"]
    other = torch.rand(1, 3, 9, 9)
    assert torch.equal(gm(other), model(other))
    extractor = featx.create_feature_extractor(model, ["head"], tracer="symbolic")
    assert torch.equal(extractor(other)["head"], model(other))


@pytest.mark.parametrize("is_marked", [False, True])
def test_an_extractor_is_not_traced_symbolically_itself(is_marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    extractor = featx.create_feature_extractor(inner, ["0"], example_inputs=torch.rand(2, 3, 8, 8))
    if is_marked:  # as torch.fx leaves it where it has made code of a graph with such a check
        namespace = {"featx_check_is_tensor": check_is_tensor}
        registry = {(id(namespace), "featx_check_is_tensor"): namespace}
        monkeypatch.setattr("torch.fx._symbolic_trace._wrapped_fns_to_patch", registry)
    with pytest.raises(featx.SpecializationError, match="tracer='symbolic'"):
        featx.symbolic_trace(extractor)
