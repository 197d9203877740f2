"""create_feature_extractor: torch.compile and torch.export accept what it returns (point 9)."""

from __future__ import annotations

import copy
import functools
import io
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torchvision
from torch import nn

import featx

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Compilable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels = x.shape[:2]
        x = self.relu(self.bn(self.conv(x))) * self.scale
        x += 1
        return x.reshape(batch, -1).softmax(dim=-1) / math.sqrt(channels)


NAMES = ["bn", "relu", "add", "softmax", "truediv"]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_9_torch_compile_takes_the_whole_graph(training: bool) -> None:
    extractor = featx.create_feature_extractor(Compilable().train(training), NAMES)
    expected = copy.deepcopy(extractor)(X)
    torch.compiler.reset()
    result = torch.compile(extractor, fullgraph=True, backend="eager")(X)
    assert list(result) == NAMES
    assert all(torch.equal(result[name], expected[name]) for name in NAMES)


@pytest.mark.slow
def test_9_torch_export_takes_it() -> None:
    extractor = featx.create_feature_extractor(Compilable().eval(), NAMES)
    expected = extractor(X)
    program = torch.export.export(extractor, (X,))
    result = program.module()(X)
    assert list(result) == NAMES
    assert all(torch.equal(result[name], expected[name]) for name in NAMES)


class Holder(nn.Module):
    def __init__(self, inner: featx.GraphModule) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.inner(x)


class OneMoreInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training:
            x = self.second(x)
        return x * 2


def extractor_of_two_graphs() -> featx.GraphModule:
    return featx.create_feature_extractor(OneMoreInTraining().eval(), ["mul"], suppress_diff_warning=True)


def loaded(module: featx.GraphModule) -> featx.GraphModule:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def negated(module: featx.GraphModule, *, recompile: bool) -> featx.GraphModule:
    node = module.graph.find_nodes(op="call_function", target=operator.mul)[0]
    with module.graph.inserting_after(node):
        negative = module.graph.call_function(torch.neg, (node,))
    node.replace_all_uses_with(negative, delete_user_cb=lambda user: user is not negative)
    if recompile:
        module.recompile()
    return module


def switched(module: featx.GraphModule, *modes: bool) -> featx.GraphModule:
    for mode in modes:
        module.train(mode)
    return module


HELD: dict[str, Callable[[], featx.GraphModule]] = {
    "extractor": extractor_of_two_graphs,
    "traced": lambda: featx.symbolic_trace(OneMoreInTraining().eval()),
    "copied": lambda: copy.deepcopy(extractor_of_two_graphs()),
    "loaded": lambda: loaded(extractor_of_two_graphs()),
    "edited": lambda: negated(extractor_of_two_graphs(), recompile=True),
    "edited, not recompiled": lambda: negated(extractor_of_two_graphs(), recompile=False),
    "train": lambda: switched(extractor_of_two_graphs(), True),
    "train and eval": lambda: switched(extractor_of_two_graphs(), True, False),
    "copied in train": lambda: copy.deepcopy(switched(extractor_of_two_graphs(), True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "export"])
def test_9_model_that_holds_an_extractor_that_has_not_run_is_compiled(kind: str, compiler: str) -> None:
    torch.compiler.reset()
    holder, x = Holder(HELD[kind]()), torch.rand(2, 8)
    expected = copy.deepcopy(holder)(x)
    if compiler == "export":
        result = torch.export.export(holder, (x,), strict=True).module()(x)
    else:
        result = torch.compile(holder, fullgraph=True, backend=compiler)(x)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_9_compiled_model_follows_later_edits_and_switches_of_an_extractor_that_it_holds() -> None:
    torch.compiler.reset()
    model, x = OneMoreInTraining().eval(), torch.rand(2, 8)
    extractor = featx.create_feature_extractor(model, ["mul"], suppress_diff_warning=True)
    holder = Holder(extractor)
    compiled = torch.compile(holder, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x)["mul"], model(x))
    negated(extractor, recompile=False)
    for _ in range(2):
        assert torch.equal(compiled(x)["mul"], -model(x))
    holder.train()
    assert torch.equal(compiled(x)["mul"], model.train()(x))
    holder.eval()
    model.eval()
    for _ in range(2):
        assert torch.equal(holder(x)["mul"], -model(x))
        assert torch.equal(compiled(x)["mul"], -model(x))


@pytest.mark.slow
@pytest.mark.parametrize("takes_texts", [False, True], ids=["images", "texts"])
def test_more_extractors_than_one_code_may_be_compiled_for(takes_texts: bool) -> None:
    """Torch.compile takes eight modules for the code of one function."""
    torch._dynamo.reset()
    first = nn.Embedding(10, 4) if takes_texts else nn.Linear(4, 4)
    model = nn.Sequential(first, *[nn.Linear(4, 4) for _ in range(11)]).eval()
    x = torch.arange(6).reshape(2, 3) if takes_texts else torch.rand(2, 4)
    for number in range(12):
        extractor = featx.create_feature_extractor(model, [str(number)], example_inputs=x)
        compiled = torch.compile(extractor, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x)[str(number)], extractor(x)[str(number)])


class KeepsAPart(nn.Module):
    """Takes a part of the tokens, as masked autoencoders do: `int` of a float that a size gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, : int(x.shape[1] * 0.5)])


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["compile", "export", "script"])
def test_a_part_of_a_size_is_compiled(compiler: str) -> None:
    model, x = KeepsAPart().eval(), torch.rand(2, 6, 8)
    extractor = featx.create_feature_extractor(model, ["layer"], example_inputs=x)
    with torch.no_grad():
        if compiler == "compile":
            compiled = torch.compile(extractor, backend="eager", fullgraph=True)
        elif compiler == "export":
            compiled = torch.export.export(extractor, (x,), strict=True).module()
        else:
            compiled = torch.jit.script(extractor)
        torch.testing.assert_close(compiled(x)["layer"], model(x), rtol=0, atol=0)


class TakesAMask(nn.Module):
    """Asks whether there is a mask, and whether it leaves something out, as text models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = self.layer(self.embed(ids))
        return h if mask is None or bool(mask.all()) else h * mask[..., None]


@pytest.mark.slow
def test_a_compiled_extractor_goes_on_with_inputs_of_another_kind() -> None:
    torch.manual_seed(0)
    model, ids = TakesAMask().eval(), torch.randint(20, (2, 5))
    padded = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    extractor = featx.create_feature_extractor(model, ["output"], example_inputs={"ids": ids, "mask": padded})
    compiled = torch.compile(extractor, backend="eager")
    with torch.no_grad():
        for inputs in ({"mask": padded}, {}, {"mask": padded | True}, {"mask": padded}, {}):
            torch.testing.assert_close(compiled(ids=ids, **inputs)["output"], model(ids, **inputs), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [True, False])
def test_an_adaptive_extractor_is_compiled_for_each_case(by_name: bool) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.one(x)
            return self.other(y) if x.shape[0] > 2 else y

    model, small, large = Gate().eval(), torch.rand(2, 8), torch.rand(5, 8)
    extractor = featx.create_feature_extractor(model, {"output": "y"}, example_inputs=small, adaptive=True).eval()
    torch._dynamo.reset()
    compiled = torch.compile(extractor, backend="eager")
    with torch.no_grad():
        for x in (small, large, small, large):
            found = compiled(x=x) if by_name else compiled(x)
            assert torch.equal(found["y"], model(x))


@functools.cache
def _bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=100
    )
    return transformers.BertModel(config).eval()


def _texts() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": torch.arange(18).view(2, 9), "attention_mask": mask}


_TEXT_COMPILERS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "compile": lambda extractor: torch.compile(extractor, fullgraph=True, backend="eager"),
    "export": lambda extractor: torch.export.export(extractor, (), _texts()).module(),
    "strict export": lambda extractor: torch.export.export(extractor, (), _texts(), strict=True).module(),
    "jit.trace": lambda extractor: cast(Any, torch.jit).trace(extractor, example_kwarg_inputs=_texts(), strict=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiler", _TEXT_COMPILERS)
@pytest.mark.filterwarnings("ignore")
def test_an_extractor_with_a_mask_is_compiled_for_texts_with_padding_and_without(compiler: str) -> None:
    model, texts = _bert(), _texts()
    extractor = featx.create_feature_extractor(model, {"encoder.layer.0": "first"}, example_inputs=texts).eval()
    with torch.no_grad():
        compiled = _TEXT_COMPILERS[compiler](extractor)
        for mask in (texts["attention_mask"], torch.ones_like(texts["attention_mask"])):
            inputs = {**texts, "attention_mask": mask}
            expected = model(**inputs, output_hidden_states=True).hidden_states[1]
            torch.testing.assert_close(compiled(**inputs)["first"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["export", "jit.trace"])
@pytest.mark.filterwarnings("ignore")
def test_an_extractor_that_leaves_the_mask_out_is_not_compiled(compiler: str) -> None:
    texts = {**_texts(), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    extractor = featx.create_feature_extractor(_bert(), ["encoder.layer.0"], example_inputs=texts).eval()
    with pytest.raises(featx.SpecializationError, match="make the extractor with an example whose mask has a 0"):
        _TEXT_COMPILERS[compiler](extractor)


@pytest.mark.slow
def test_an_extractor_of_a_causal_model_without_a_mask_is_exported() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=60,
    )
    model = transformers.LlamaModel(config).eval()
    example = {"input_ids": torch.arange(16).view(2, 8), "use_cache": False}
    extractor = featx.create_feature_extractor(model, {"norm": "last"}, example_inputs=example).eval()
    exported = torch.export.export(extractor, (), example).module()
    torch.testing.assert_close(exported(**example)["last"], model(**example).last_hidden_state)


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return x * 2 if x.shape[2] > 40 or x.shape[3] % 7 == 6 else x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_decision_about_sizes_is_compiled_for_other_sizes() -> None:
    """From the second size on, the compiler has symbolic numbers and truth values."""
    torch.compiler.reset()
    model = Decides().eval()
    extractor = featx.create_feature_extractor(
        model, ["output"], example_inputs=torch.rand(1, 3, 32, 32), adaptive=False
    )
    compiled = torch.compile(extractor, backend="eager")
    for size in (32, 38, 36):
        x = torch.rand(1, 3, size, size)
        assert torch.equal(compiled(x)["output"], model(x))
    with pytest.raises(featx.SpecializationError, match="True now, False on the example"):
        compiled(torch.rand(1, 3, 48, 36))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adaptive_extractor_is_compiled_graph_by_graph() -> None:
    torch.compiler.reset()
    resnet = torchvision.models.resnet18(weights=None).eval()
    for fullgraph in (False, True):
        whole = featx.create_feature_extractor(
            resnet, ["layer1"], example_inputs=torch.rand(1, 3, 32, 32), adaptive=True
        )
        x = torch.rand(2, 3, 40, 40)
        compiled = torch.compile(whole.eval(), backend="eager", fullgraph=fullgraph)
        assert torch.equal(compiled(x)["layer1"], whole(x)["layer1"])
    model = Decides().eval()
    extractor = featx.create_feature_extractor(
        model, ["output"], example_inputs=torch.rand(1, 3, 32, 32), adaptive=True
    )
    compiled = torch.compile(extractor, backend="eager")
    for size in (32, 64, 36, 48, 34):
        x = torch.rand(1, 3, size, size)
        assert torch.equal(compiled(x)["output"], model(x))
    for size in (64, 32):  # the graph of that case
        x = torch.rand(1, 3, size, size)
        extractor(x)
        for strict in (False, True):
            exported = torch.export.export(extractor.eval(), (x,), strict=strict)
            assert torch.equal(exported.module()(x)["output"], model(x))
