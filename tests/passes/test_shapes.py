"""ShapeProp: shapes, dtypes and layouts are those of the values that the model really computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import ShapeProp as PeerShapeProp

import featx
from featx import ShapeProp
from featx.passes.shapes import TensorMetadata

torchvision = pytest.importorskip("torchvision")


class WritesState(nn.Module):
    """Does to itself, its input and the world what a forward may do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(2, 4))
        self.calls = 0
        self.seen: Any = None
        self.history: list[int] = []
        self.table = torch.zeros(3)  # no buffer

    def forward(self, x: torch.Tensor):
        x.add_(1)
        self.calls += 1
        self.history.append(self.calls)
        self.seen = x
        self.table.add_(1)
        y = self.linear(x)
        self.queue[0] = y[0]
        return self.norm(y) + torch.rand(4) + self.queue.sum()


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor):
        return self.inner(x).relu()


class WholeTracer(featx.Tracer):
    """Keeps the children of the root whole."""

    def is_leaf_module(self, m: Any, module_qualified_name: Any):
        return True


def whole(model: nn.Module) -> featx.GraphModule:
    return featx.GraphModule(model, WholeTracer().trace(model))


def on_meta(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def notes(module: Any) -> list[tuple[str, Any, Any]]:
    # TensorMetadata is compared as a tuple: torch.fx has a class of its own.
    return [(n.name, plain(n.meta.get("tensor_meta")), n.meta["type"]) for n in module.graph.nodes]


def plain(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, (tuple, list)) else value


def state_of(model: nn.Module) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    attributes = [
        {key: id(value) for key, value in m.__dict__.items() if not isinstance(value, (dict, set))}
        for m in model.modules()
    ]
    return [
        [t.detach().clone() for t in tensors],
        [t.requires_grad for t in tensors],
        attributes,
        torch.get_rng_state(),
    ]


def same_state(one: list[Any], other: list[Any]) -> bool:
    return all(map(torch.equal, one[0], other[0])) and one[1:3] == other[1:3] and bool(torch.equal(one[3], other[3]))


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_meta_is_torch_fx_s_on_real_values_however_it_is_propagated(name: str, training: bool, gradients: bool) -> None:
    model = torchvision.models.get_model(name, weights=None).train(training)
    value = torch.rand(2, 3, 64, 64)
    peer = torch.fx.symbolic_trace(copy.deepcopy(model))
    traced = featx.symbolic_trace(model)
    with torch.set_grad_enabled(gradients):
        PeerShapeProp(peer).propagate(value)
        expected = notes(peer)
        before = state_of(model)
        result = ShapeProp(traced).propagate(value)
        assert notes(traced) == expected
        if not training:
            assert torch.equal(result, model(value))
        result = ShapeProp(traced).propagate(on_meta(value))
        assert result.is_meta
        assert [note[:2] for note in notes(traced)] == [note[:2] for note in expected]
    assert same_state(state_of(model), before)


@pytest.mark.slow
def test_fake_tensors_give_what_real_ones_give() -> None:
    model = torchvision.models.resnet18(weights=None).train()
    traced, value = featx.symbolic_trace(model), torch.rand(2, 3, 64, 64)
    ShapeProp(traced).propagate(value)
    expected = [note[:2] for note in notes(traced)]
    before = state_of(model)
    mode = FakeTensorMode()
    result = ShapeProp(traced, mode).propagate(value)
    assert type(result).__name__ == "FakeTensor"
    assert [note[:2] for note in notes(traced)] == expected
    ShapeProp(traced).propagate(mode.from_tensor(value))  # the mode of an input serves
    assert [note[:2] for note in notes(traced)] == expected
    assert same_state(state_of(model), before)


class WithState(nn.Module):
    """Starts a recurrent layer from a state that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(4, 6)

    def forward(self, x: torch.Tensor):
        return self.cell(x, torch.zeros(1, 3, 6))


@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 6, 2, dropout=0.5, batch_first=True, bidirectional=True), nn.RNN(4, 6),
        nn.RNN(4, 6, nonlinearity="relu"), WithState(),
    ],
)  # fmt: skip
def test_recurrent_layers_take_an_input_on_the_meta_device(layer: nn.Module, gradients: bool) -> None:
    traced, value = featx.symbolic_trace(nn.Sequential(layer)), torch.rand(5, 3, 4)
    with torch.set_grad_enabled(gradients):
        ShapeProp(traced).propagate(value)
        expected = notes(traced)
        ShapeProp(traced).propagate(on_meta(value))
    assert notes(traced) == expected


@pytest.mark.slow
def test_weights_stay_where_they_are_on_the_meta_device() -> None:
    model = torchvision.models.vit_b_16(weights=None)
    traced = featx.symbolic_trace(model)
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    assert ShapeProp(traced).propagate(torch.empty(5, 3, 224, 224, device="meta")).shape == (5, 1000)
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_whole_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    traced = featx.symbolic_trace(model)
    ShapeProp(traced).propagate(torch.empty(2, 3, 9, 9, device="meta"))
    assert {node.meta["tensor_meta"].shape for node in traced.graph.nodes} == {(2, 3, 9, 9), (2, 8, 4, 4)}


def test_values_that_are_no_tensors_and_nested_ones() -> None:
    def function(x: torch.Tensor):
        parts = x.split(2, dim=1)
        return {"parts": parts, "size": x.shape[0], "one": parts[0]}

    traced = featx.symbolic_trace(function)
    ShapeProp(traced).propagate(torch.rand(3, 6))
    meta = {node.name: node.meta for node in traced.graph.nodes}
    assert "tensor_meta" not in meta["getattr_1"]
    assert meta["getattr_1"]["type"] is torch.Size
    assert [part.shape for part in meta["split"]["tensor_meta"]] == [(3, 2)] * 3
    assert meta["output"]["type"] is dict
    assert meta["output"]["tensor_meta"]["size"] == 3
    assert isinstance(meta["output"]["tensor_meta"]["one"], TensorMetadata)


def test_note_of_an_earlier_run_does_not_outlast_a_value_without_tensors() -> None:
    graph = featx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("tolist", (x,)))
    module = featx.GraphModule(nn.Module(), graph)
    for node in module.graph.nodes:
        node.meta["tensor_meta"] = "stale"
    ShapeProp(module).propagate(torch.rand(2))
    assert ["tensor_meta" in node.meta for node in module.graph.nodes] == [True, False, False]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.rand(2, 3, 4, 4), torch.contiguous_format),
        (torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), torch.channels_last),
        (torch.rand(2, 3, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d), torch.channels_last_3d),
        (torch.rand(4, 5).t(), None),
    ],
)
def test_layouts(value: torch.Tensor, name: Any) -> None:
    traced = featx.symbolic_trace(lambda x: x)
    ShapeProp(traced).propagate(value)
    meta = next(iter(traced.graph.nodes)).meta["tensor_meta"]
    assert (meta.memory_format, meta.stride, meta.is_quantized) == (name, value.stride(), False)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
def test_quantized_and_sparse_tensors() -> None:
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    from featx.passes.shapes import metadata_of

    by_channel = torch.quantize_per_channel(torch.rand(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    by_tensor = torch.quantize_per_tensor(torch.rand(3), 0.5, 3, torch.quint8)
    for value in (by_channel, by_tensor, torch.eye(3).to_sparse()):
        assert tuple(metadata_of(value)) == tuple(_extract_tensor_metadata(value))


# -- the model and the inputs stay as they were ------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", ["real", "meta", "fake"])
def test_module_that_writes_everything_is_left_as_it_was(place: str, training: bool) -> None:
    model = Wrapper(WritesState()).train(training)
    module = whole(model)
    value = torch.rand(3, 4)
    given = value.clone()
    before = state_of(model)
    ShapeProp(module, FakeTensorMode() if place == "fake" else None).propagate(
        on_meta(value) if place == "meta" else value
    )
    assert same_state(state_of(model), before)
    assert model.inner.queue.grad_fn is None
    assert model.inner.history == []
    assert model.inner.table.tolist() == [0.0] * 3
    assert torch.equal(value, given)
    assert module.graph.find_nodes(op="call_module")[0].meta["tensor_meta"].shape == (3, 4)


def test_weight_norm_leaves_its_weight() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(3, 5))
    module = whole(nn.Sequential(layer))
    weight = layer.weight
    ShapeProp(module).propagate(torch.empty(2, 3, device="meta"))
    assert layer.weight is weight


def test_result_has_the_values_of_the_run_where_it_shares_memory_that_is_put_back() -> None:
    def function(x: torch.Tensor):
        x.add_(1)
        return x

    value = torch.zeros(3)
    result = ShapeProp(featx.symbolic_trace(function)).propagate(value)
    assert torch.equal(result, torch.ones(3))
    assert torch.equal(value, torch.zeros(3))


def test_generators_of_python_and_torch_are_put_back() -> None:
    import random

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor):
            return x * random.random() + torch.rand(3, generator=self.generator) + torch.rand(3)

    model = nn.Sequential(Draws())
    module = whole(model)

    def draws() -> list[Any]:
        return [random.getstate(), torch.get_rng_state().tolist(), model[0].generator.get_state().tolist()]

    value = torch.rand(3)
    before = draws()
    ShapeProp(module).propagate(value)
    assert draws() == before


def test_a_seed_is_put_back_after_a_run_without_values() -> None:
    class Seeds(nn.Module):
        def forward(self, x: torch.Tensor):
            torch.manual_seed(5)
            return x + torch.rand(3)

    before = torch.get_rng_state()
    ShapeProp(whole(nn.Sequential(Seeds()))).propagate(torch.empty(3, device="meta"))
    assert torch.equal(torch.get_rng_state(), before)


def test_cached_functions_keep_no_tensor_without_values() -> None:
    import functools

    @functools.lru_cache
    def table(x_shape: int, like: Any) -> torch.Tensor:
        return like.new_ones(x_shape)

    class Cached(nn.Module):
        def forward(self, x: torch.Tensor):
            return x + CACHE["table"](4, x)

    CACHE["table"] = table
    module = whole(nn.Sequential(Cached()))
    ShapeProp(module).propagate(torch.empty(2, 4, device="meta"))
    assert module(torch.ones(2, 4)).tolist() == [[2.0] * 4] * 2


CACHE: dict[str, Callable[..., torch.Tensor]] = {}


# -- what cannot be said -----------------------------------------------------------------------------------------------


def test_question_for_a_value_on_the_meta_device_names_node_and_operator() -> None:
    def function(x: torch.Tensor):
        return x * x.sum().item()

    module = featx.trace(function, torch.rand(3))
    before = [dict(node.meta) for node in module.graph.nodes]
    with pytest.raises(featx.InputError, match=r"needs values.*pass real tensors") as caught:
        ShapeProp(module).propagate(torch.empty(3, device="meta"))
    assert "item" in str(getattr(caught.value, "__notes__", caught.value.__cause__))
    assert [dict(node.meta) for node in module.graph.nodes] == before, "a failed run leaves the meta as it was"
    assert ShapeProp(module).propagate(torch.ones(3)).tolist() == [3.0] * 3


def test_constants_and_untouched_buffers_have_values_on_the_meta_device() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("width", torch.tensor(3))

        def forward(self, x: torch.Tensor):
            steps = torch.arange(4).add_(1)
            steps[0] = 2
            return x.new_zeros(int(self.width), int(steps.sum())) + int(steps.max())

    model = nn.Sequential(Counts())
    assert ShapeProp(whole(model)).propagate(torch.empty(2, device="meta")).shape == (3, 11)
    assert model[0].width == 3


def test_buffer_that_was_written_has_no_value_on_the_meta_device() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("width", torch.tensor([3, 4]))

        def forward(self, x: torch.Tensor):
            self.width[1:].add_(1)
            return x.new_zeros(int(self.width[1]))

    model = nn.Sequential(Writes())
    module = whole(model)
    with pytest.raises(featx.InputError, match="needs values"):
        ShapeProp(module).propagate(torch.empty(2, device="meta"))
    assert model[0].width.tolist() == [3, 4]
    assert ShapeProp(module).propagate(torch.empty(2)).shape == (5,)


def test_autocast_is_refused_on_the_meta_device_and_seen_elsewhere() -> None:
    module = featx.symbolic_trace(nn.Sequential(nn.Conv1d(3, 4, 1, padding_mode="circular")))
    value = torch.rand(2, 3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(featx.InputError, match="autocast"):
            ShapeProp(module).propagate(on_meta(value))
        for fake_mode in (None, FakeTensorMode()):
            ShapeProp(module, fake_mode).propagate(value)
            assert module.graph.find_nodes(op="output")[0].meta["tensor_meta"].dtype is torch.bfloat16


def test_rules_do_not_hide_autocast() -> None:
    module = featx.symbolic_trace(nn.Sequential(nn.Linear(3, 4)))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(featx.InputError, match="autocast"):
        ShapeProp(module).propagate(torch.empty(2, 3, device="meta"))


def test_casts_of_weights_that_autocast_remembers_are_forgotten() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
                return self.linear(x)

    model = Casts()
    module, value = whole(Wrapper(model)), torch.rand(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        ShapeProp(module, FakeTensorMode()).propagate(value)
        assert type(model(value)) is torch.Tensor


def test_module_with_hooks_is_really_called() -> None:
    layer = nn.Linear(3, 4)
    layer.register_forward_hook(lambda module, args, output: output[:, :2])
    module = featx.symbolic_trace(nn.Sequential(layer, nn.ReLU()))
    assert ShapeProp(module).propagate(torch.empty(5, 3, device="meta")).shape == (5, 2)


# -- torch.fx's surface ------------------------------------------------------------------------------------------------


def test_other_ways_to_run_and_subclasses() -> None:
    class Names(ShapeProp):
        def run_node(self, n: Any):
            result = super().run_node(n)
            n.meta["seen"] = n.meta["tensor_meta"].shape
            return result

    traced = featx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    Names(traced).propagate(input=torch.rand(2, 3))
    assert [node.meta["seen"] for node in traced.graph.nodes] == [(2, 3), (2, 4), (2, 4), (2, 4)]
    values = [torch.rand(7, 3)]
    assert ShapeProp(traced).boxed_run(values).shape == (7, 4)
    assert values == []
    assert traced.graph.output_node().meta["tensor_meta"].shape == (7, 4)


def test_inputs_that_do_not_fit() -> None:
    traced = featx.symbolic_trace(nn.Linear(3, 4))
    with pytest.raises(featx.InputError, match="takes the inputs input"):
        ShapeProp(traced).propagate()
    with pytest.raises(RuntimeError, match="reduction dim"):
        ShapeProp(traced).propagate(torch.empty(2, 5, device="meta"))
    assert all("tensor_meta" not in node.meta for node in traced.graph.nodes)


@pytest.mark.parametrize("place", ["real", "meta"])
def test_inference_mode(place: str) -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)).train()
    traced, value = featx.symbolic_trace(model), torch.rand(2, 3, 8)
    before = state_of(model)
    with torch.inference_mode():
        ShapeProp(traced).propagate(on_meta(value) if place == "meta" else value)
    assert same_state(state_of(model), before)
    assert traced.graph.output_node().meta["tensor_meta"].shape == (2, 4, 6)
