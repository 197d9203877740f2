"""Extractors on a GPU: made there, moved there, and of models that are spread over devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import featx

_IMAGES = {"x": torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))}
_TOKENS = {"input_ids": torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))}
_PADDED = {**_TOKENS, "attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3])}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


class Parts(nn.Module):
    """Makes tensors in forward in the ways in which code does, on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.rnn = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.scale = torch.linspace(0, 1, 12)  # no buffer
        self.register_buffer("shift", torch.arange(12.0), persistent=False)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.shape[2], device=x.device)
        places = self.embed(index % 16) + torch.zeros(x.shape[2], 8).to(x)
        found, _ = self.rnn(places[None] + x.mean((1, 3))[..., None])
        found = found * self.scale.to(found.device, non_blocking=True) + self.shift
        mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).tril()
        scores = (found @ found.transpose(1, 2)).masked_fill(~mask, float("-inf")).softmax(-1)
        with torch.autocast(x.device.type, enabled=False):
            return self.fc(scores @ found + found.new_ones(1) + torch.full_like(found, 0.5))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "resnet18": (lambda: torchvision.models.resnet18(weights=None), _IMAGES),
    "maxvit": (lambda: timm.create_model("maxvit_rmlp_pico_rw_256", img_size=64), _IMAGES),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4), _IMAGES),
    "convnext": (lambda: timm.create_model("convnext_atto"), _IMAGES),
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", img_size=64), _IMAGES),
    "eva02": (lambda: timm.create_model("eva02_tiny_patch14_224", img_size=56), {"x": _IMAGES["x"][..., :56, :56]}),
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(vocab_size=50, **_SMALL)), _PADDED),
    "llama": (lambda: transformers.LlamaModel(transformers.LlamaConfig(vocab_size=50, **_SMALL)), _PADDED),
    "qwen2": (
        lambda: transformers.Qwen2Model(transformers.Qwen2Config(vocab_size=50, num_key_value_heads=2, **_SMALL)),
        _TOKENS,
    ),
    "t5": (
        lambda: transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=50, d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48)
        ),
        _PADDED,
    ),
    "gpt2": (
        lambda: transformers.GPT2Model(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=1)
        ),
        _TOKENS,
    ),
    "parts": (Parts, _IMAGES),
}


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    make, inputs = CASES[name]
    return make().eval(), inputs


def on(device: str, value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), value)


def hooked(model: nn.Module, inputs: dict[str, torch.Tensor], paths: list[str]) -> dict[str, Any]:
    """What the modules at these paths return in a call of the model."""
    found: dict[str, Any] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda module, args, output: found.__setitem__(path, tree_map_only(torch.Tensor, torch.clone, output))

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def paths_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[str]:
    """Up to a dozen modules that are nodes and are called once, spread over the model."""
    names = featx.get_graph_node_names(model, example_inputs=inputs)[1]
    paths = [path for path, _ in model.named_modules() if path in names and f"{path}_1" not in names]
    return paths[:: max(1, len(paths) // 12)]


def assert_equal(expected: dict[str, Any], found: dict[str, Any], device: str) -> None:
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        for one, other in zip(tree_leaves(value), tree_leaves(found[key]), strict=True):
            if isinstance(one, torch.Tensor):
                assert other.device.type == device, key
                assert torch.equal(one, other), key


@pytest.mark.parametrize("name", CASES)
def test_made_on_the_cpu_and_moved(name: str) -> None:
    model, inputs = build(name)
    paths = paths_of(model, inputs)
    extractor = featx.create_feature_extractor(model, paths, example_inputs=inputs).eval()
    extractor.to("cuda")
    given = on("cuda", inputs)
    expected = hooked(copy.deepcopy(model).to("cuda"), given, paths)
    with torch.no_grad():
        assert_equal(expected, extractor(**given), "cuda")


@pytest.mark.parametrize("name", CASES)
def test_made_on_the_gpu_and_moved_back(name: str) -> None:
    model, inputs = build(name)
    original = copy.deepcopy(model)
    model.to("cuda")
    given = on("cuda", inputs)
    before = torch.cuda.get_rng_state()
    paths = paths_of(model, given)
    extractor = featx.create_feature_extractor(model, paths, example_inputs=given).eval()
    assert torch.equal(before, torch.cuda.get_rng_state())
    with torch.no_grad():
        assert_equal(hooked(model, given, paths), extractor(**given), "cuda")
        expected = hooked(original, inputs, paths)
        assert_equal(expected, copy.deepcopy(extractor).to("cpu")(**inputs), "cpu")


@pytest.mark.parametrize("name", ["resnet18", "vit", "convnext", "bert", "llama"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name)
    model.to("cuda", dtype)
    given = {key: value.to("cuda", dtype if value.is_floating_point() else None) for key, value in inputs.items()}
    paths = paths_of(model, given)
    extractor = featx.create_feature_extractor(model, paths, example_inputs=given).eval()
    with torch.no_grad():
        assert_equal(hooked(model, given, paths), extractor(**given), "cuda")


@pytest.mark.parametrize("name", ["resnet18", "vit", "llama"])
@pytest.mark.parametrize("is_traced_inside", [False, True])
def test_under_autocast(name: str, is_traced_inside: bool) -> None:
    model, inputs = build(name)
    model.to("cuda")
    given = on("cuda", inputs)
    with torch.autocast("cuda", torch.bfloat16, enabled=is_traced_inside):
        paths = paths_of(model, given)
        extractor = featx.create_feature_extractor(model, paths, example_inputs=given).eval()
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        assert_equal(hooked(model, given, paths), extractor(**given), "cuda")


@pytest.mark.parametrize("name", ["resnet18", "vit", "convnext"])
def test_channels_last(name: str) -> None:
    model, inputs = build(name)
    model.to("cuda", memory_format=torch.channels_last)
    given = {"x": inputs["x"].to("cuda", memory_format=torch.channels_last)}
    paths = paths_of(model, given)
    extractor = featx.create_feature_extractor(model, paths, example_inputs=given).eval()
    with torch.no_grad():
        found = extractor(**given)
        expected = hooked(model, given, paths)
    assert_equal(expected, found, "cuda")
    assert {key: value.stride() for key, value in found.items()} == {k: v.stride() for k, v in expected.items()}


@pytest.mark.parametrize("name", ["resnet18", "swin", "vit", "bert"])
def test_gradients(name: str) -> None:
    model, inputs = build(name)
    model.to("cuda")
    given = on("cuda", inputs)
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs=given).eval()

    def gradients(call: Callable[[], Any]) -> list[torch.Tensor | None]:
        model.zero_grad()
        leaves = [leaf for leaf in tree_leaves(call()) if isinstance(leaf, torch.Tensor)]
        sum(leaf.square().mean() for leaf in leaves).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(lambda: model(**given))
    found = gradients(lambda: extractor(**given))
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_dropout_draws_as_the_model_does() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.1)).to("cuda").train()
    x = torch.rand(4, 8, device="cuda")
    before = torch.cuda.get_rng_state()
    extractor = featx.create_feature_extractor(model, ["1", "3"], example_inputs=x)
    assert torch.equal(before, torch.cuda.get_rng_state())
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(extractor.train()(x)["3"], expected)


class TwoDevices(nn.Module):
    """Its first half is on the CPU, and it moves values itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8).to("cuda")
        self.third = nn.Linear(8, 8).to("cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).to(self.second.weight.device))
        z = self.third((y.cuda() + torch.arange(8, device="cuda")).to("cuda:0", non_blocking=True))
        return self.first(z.cpu()) + x


def test_a_model_on_two_devices() -> None:
    model = TwoDevices().eval()
    x = torch.rand(3, 8)
    paths = ["first", "second", "third", "first_1", "output"]
    extractor = featx.create_feature_extractor(model, paths, example_inputs=x)
    found = extractor(x)
    expected = hooked(model, {"x": x}, ["second", "third", "first"])
    assert [found[path].device.type for path in paths] == ["cpu", "cuda", "cuda", "cpu", "cpu"]
    assert torch.equal(found["second"], expected["second"])
    assert torch.equal(found["third"], expected["third"])
    assert torch.equal(found["first_1"], expected["first"])  # its second call
    assert torch.equal(found["output"], model(x))


class AsksForTheDevice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.is_cuda else x * 3


def test_code_that_does_something_else_on_a_gpu() -> None:
    x = torch.rand(2)
    extractor = featx.create_feature_extractor(AsksForTheDevice(), ["output"], example_inputs=x)
    assert torch.equal(extractor(x)["output"], x * 3)
    assert torch.equal(extractor(x.cuda())["output"], x.cuda() * 2)  # it traces again
    traced = featx.trace(AsksForTheDevice(), x)
    with pytest.raises(featx.SpecializationError, match=r"device|is_cuda"):
        traced(x.cuda())


@pytest.mark.parametrize("name", ["resnet18", "vit", "bert"])
def test_names_and_tracers_are_those_of_the_cpu(name: str) -> None:
    model, inputs = build(name)
    names = featx.get_graph_node_names(model, example_inputs=inputs)
    model.to("cuda")
    assert featx.get_graph_node_names(model, example_inputs=on("cuda", inputs)) == names
    if name == "resnet18":
        assert featx.get_graph_node_names(model) == names  # the example is made on the device of the weights
        traced = featx.symbolic_trace(model)
        with torch.no_grad():
            assert torch.equal(traced(inputs["x"].cuda()), model(inputs["x"].cuda()))


@pytest.mark.parametrize("name", ["resnet18", "swin", "vit"])
def test_a_backbone_moves(name: str) -> None:
    model, inputs = build(name)
    backbone = featx.create_backbone(model, strides=(16, 32) if name != "vit" else (16,), example_inputs=inputs["x"])
    on_cpu = backbone.eval()(inputs["x"])
    on_gpu = backbone.to("cuda")(inputs["x"].cuda())
    for one, other in zip(on_cpu.values(), on_gpu.values(), strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["resnet18", "convnext", "vit", "bert"])
def test_it_compiles_and_exports(name: str) -> None:
    model, inputs = build(name)
    model.to("cuda")
    given = on("cuda", inputs)
    paths = paths_of(model, given)[-2:]
    extractor = featx.create_feature_extractor(model, paths, example_inputs=given).eval()
    with torch.no_grad():
        expected = extractor(**given)
        compiled = torch.compile(extractor, backend="cudagraphs")
        for _ in range(2):
            compiled(**given)
        found = compiled(**given)  # a replay
        assert_equal(expected, tree_map_only(torch.Tensor, torch.clone, dict(found)), "cuda")
        program = torch.export.export(extractor, (), given)
        assert_equal(expected, program.module()(**given), "cuda")


@pytest.mark.parametrize("name", ["resnet18", "vit", "convnext"])
def test_a_cuda_graph_by_hand(name: str) -> None:
    """Checks of generated code wait for nothing on the GPU, so that calls can be captured."""
    model, inputs = build(name)
    model.to("cuda")
    given = on("cuda", inputs)["x"]
    paths = paths_of(model, {"x": given})[-2:]
    extractor = featx.create_feature_extractor(model, paths, example_inputs=given).eval()
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                extractor(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = extractor(given)
        given.copy_(torch.rand_like(given))
        graph.replay()
        assert_equal(extractor(given), found, "cuda")


def test_analysis_on_a_gpu() -> None:
    model, inputs = build("resnet18")
    model.to("cuda")
    x = inputs["x"].cuda()
    traced = featx.trace(model, example_inputs=x)
    report = featx.profile(traced, x, repeats=2)
    assert report.call_seconds > 0
    there = featx.cost(traced, x)
    on_cpu = featx.trace(model.cpu(), example_inputs=x.cpu())
    assert there.total.flops == featx.cost(on_cpu, x.cpu()).total.flops
