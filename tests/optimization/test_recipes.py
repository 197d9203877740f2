"""What each recipe does to an extractor, against the extractor itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.errors import SpecializationError
from featx.examples import as_example
from featx.features.dual import DualGraphModule
from featx.optimization.build import Builder
from featx.optimization.measure import relative_errors
from featx.optimization.module import OptimizedExtractor, dtypes_of, named
from featx.optimization.recipe import EXACT_REWRITES, REWRITES, Recipe

Build = Callable[..., OptimizedExtractor]
# A recipe, and the largest error that its dtype explains.
RECIPES: dict[str, tuple[Recipe, float]] = {
    "nothing": (Recipe(), 0.0),
    "exact rewrites": (Recipe(rewrites=EXACT_REWRITES), 0.0),
    "rewrites": (Recipe(rewrites=tuple(REWRITES)), 1e-5),
    "bfloat16": (Recipe(dtype="bfloat16"), 3e-2),
    "float16": (Recipe(dtype="float16"), 3e-3),
    "channels last": (Recipe(channels_last=True), 1e-5),
    "oneDNN": (Recipe(onednn=True), 1e-5),
    "parts": (Recipe(rows=3), 1e-5),
    "one thread": (Recipe(threads=1), 1e-5),
    "all": (Recipe(tuple(REWRITES), "bfloat16", channels_last=True, threads=1, rows=1), 3e-2),
}


@pytest.fixture
def build(extractor: DualGraphModule, images: torch.Tensor) -> Build:
    def build(recipe: Recipe, source: Any = extractor, inputs: Any = images) -> OptimizedExtractor:
        example = as_example(inputs)
        dtypes = dtypes_of(named(source(*example.args, **example.kwargs)))
        return Builder(source, example, dtypes).build(recipe)

    return build


@pytest.mark.parametrize("name", RECIPES)
def test_values_are_those_of_the_extractor(
    name: str, build: Build, extractor: DualGraphModule, images: torch.Tensor
) -> None:
    recipe, error = RECIPES[name]
    optimized = build(recipe)
    for batch in (images, torch.randn(5, 3, 16, 16)):
        expected, found = extractor(batch), optimized(batch)
        assert list(found) == list(expected)
        errors = relative_errors({key: value.detach() for key, value in expected.items()}, found)
        assert max(errors.values()) <= error, errors
        assert {value.dtype for value in found.values()} == {torch.float32}
    assert (
        max(errors.values()) > 0 or error == 0 or recipe.rows or recipe.threads or recipe.channels_last or recipe.onednn
    )


def test_all_rewrites_change_this_network(build: Build, extractor: DualGraphModule, images: torch.Tensor) -> None:
    builder = Builder(extractor, as_example(images), {})
    assert builder.effective_rewrites(tuple(REWRITES)) == tuple(REWRITES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "freezing"])
def test_compiled(kind: str, build: Build, extractor: DualGraphModule, images: torch.Tensor) -> None:
    optimized = build(Recipe(rewrites=("fuse_conv_bn",), compile=kind))
    expected = {key: value.detach() for key, value in extractor(images).items()}
    assert max(relative_errors(expected, optimized(images)).values()) < 1e-5
    again = pickle.loads(pickle.dumps(optimized))
    assert max(relative_errors(expected, again(images)).values()) < 1e-5


@pytest.mark.parametrize("name", RECIPES)
def test_extractor_and_model_stay_as_they_are(
    name: str, build: Build, model: nn.Module, extractor: DualGraphModule, images: torch.Tensor
) -> None:
    before, code = copy.deepcopy(model.state_dict()), extractor.code
    strides = [parameter.stride() for parameter in model.parameters()]
    optimized = build(RECIPES[name][0])
    optimized(images)
    for parameter in optimized.parameters():
        parameter.data.zero_()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
        assert value.dtype == before[key].dtype
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert extractor.code == code


def test_it_is_described_as_the_extractor(build: Build, extractor: DualGraphModule) -> None:
    optimized = build(Recipe(dtype="bfloat16"))
    assert optimized.feature_info == extractor.feature_info
    assert optimized.channels == extractor.channels
    assert optimized.strides == extractor.strides
    assert repr(optimized).startswith(str(extractor.feature_info))


def test_it_trains_no_more(build: Build, images: torch.Tensor) -> None:
    optimized = build(Recipe())
    with pytest.warns(UserWarning, match="trains no more"):
        assert not optimized.train().training
    assert optimized.eval() is optimized
    assert not any(value.requires_grad for value in optimized(images.requires_grad_()).values())


def test_it_stays_in_eval_mode_in_a_model_that_trains(build: Build, images: torch.Tensor) -> None:
    optimized = build(Recipe())
    parent = nn.Sequential(optimized, nn.Identity())
    expected = optimized(images)
    with pytest.warns(UserWarning, match="stays in eval mode"):
        parent.train()
    assert [each.training for each in parent] == [False, True]
    assert all(torch.equal(value, expected[key]) for key, value in optimized(images).items())


@pytest.mark.slow
def test_the_whole_of_it_is_compiled(build: Build, images: torch.Tensor) -> None:
    optimized = build(Recipe(channels_last=True))
    compiled = torch.compile(optimized, fullgraph=True, backend="eager")
    for key, value in optimized(images).items():
        torch.testing.assert_close(compiled(images)[key], value)


def test_results_can_be_inputs_of_a_head_that_trains(build: Build, images: torch.Tensor) -> None:
    head = nn.Linear(16, 2)
    head(build(Recipe(dtype="bfloat16"))(images)["output"]).sum().backward()
    assert head.weight.grad is not None


def test_features_keep_a_dtype_that_was_asked_for(build: Build, model: nn.Module, images: torch.Tensor) -> None:
    nodes = {"stem": featx.Feature("map", pool="avg", dtype=torch.float16), "value": "values"}
    extractor = featx.create_feature_extractor(model, nodes, example_inputs=images)
    found = build(Recipe(dtype="bfloat16"), extractor)(images)
    assert (found["map"].dtype, found["values"].dtype) == (torch.float16, torch.float32)


def test_backbones_that_return_lists(build: Build, images: torch.Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)).eval()
    backbone = featx.create_backbone(model, strides=(2, 4), example_inputs=images, as_list=True)
    for recipe in (Recipe(), Recipe(rows=1)):
        found = build(recipe, backbone)(images)
        assert isinstance(found, list)
        torch.testing.assert_close(found, backbone(images))


def test_number_of_threads_is_put_back(build: Build, images: torch.Tensor) -> None:
    before = torch.get_num_threads()
    optimized = build(Recipe(threads=before + 1))
    optimized(images)
    assert torch.get_num_threads() == before
    with pytest.raises((SpecializationError, ValueError)):
        optimized(images[0])
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_features_whose_length_depends_on_the_batch_are_computed_at_once(build: Build) -> None:
    class CutsPadding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            longest = (ids != 0).sum(1).max()
            return self.table(ids)[:, torch.arange(ids.shape[1]) < longest]

    ids = torch.tensor([[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 7, 0], [8, 9, 0, 0]])
    extractor = featx.create_feature_extractor(CutsPadding(), {"output": "all"}, example_inputs=ids).eval()
    found = build(Recipe(rows=2), extractor, ids)(ids)["all"]
    assert torch.equal(found, extractor(ids)["all"])
    assert found.shape == (4, 3, 3)


def test_a_batch_without_rows_is_not_computed_in_parts(build: Build, images: torch.Tensor) -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    extractor = featx.create_feature_extractor(Sums(), ["sum"], example_inputs=images).eval()
    optimized = build(Recipe(rows=2), extractor)
    torch.testing.assert_close(optimized(images)["sum"], images.sum())
    assert optimized(images[:2])["sum"].dim() == 0


def test_recipes_are_kept_as_json() -> None:
    for recipe, _ in RECIPES.values():
        assert Recipe.from_json(recipe.to_json()) == recipe
    with pytest.raises(TypeError, match="unknown fields"):
        Recipe.from_json({"magic": True})


def test_which_recipes_are_exact() -> None:
    assert Recipe().is_exact
    assert Recipe(rewrites=EXACT_REWRITES).is_exact
    assert not any(RECIPES[name][0].is_exact for name in ("rewrites", "bfloat16", "channels last", "parts"))


def test_int8_says_what_to_install(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(featx.MissingExtraError, match=r'pip install "featx\[int8\]"'):
        build(Recipe(int8=True))


@pytest.mark.slow
def test_texts_with_padding_and_without(build: Build) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    ids = torch.randint(0, 1000, (3, 7))
    extractor = featx.create_feature_extractor(model, ["encoder.layer.1"], example_inputs={"input_ids": ids}).eval()
    optimized = build(Recipe(dtype="bfloat16", rows=2), extractor, {"input_ids": ids})
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        with torch.no_grad():
            expected = extractor(**inputs)
        errors = relative_errors(expected, optimized(**inputs))
        assert 0 < max(errors.values()) < 3e-2
    assert next(model.parameters()).dtype == torch.float32


def test_edited_extractor_takes_another_batch_where_a_feature_is_cloned(images: torch.Tensor) -> None:
    class Block(nn.Module):
        """A value that is a feature and is written in place afterwards."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu_(self.norm(self.conv(x)))

    model = Block().eval()
    extractor = featx.create_feature_extractor(model, ["norm", "relu_"], example_inputs=images)
    builder = Builder(extractor.eval(), as_example(images), dtypes_of(named(extractor(images))))
    module = builder.build(Recipe(rewrites=tuple(REWRITES)))
    extractor.requires_grad_(False)
    for batch in (images[:1], torch.cat([images, images, images])):
        assert max(relative_errors(extractor(batch), module(batch)).values()) <= 1e-5


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(dtype="bfloat16"), Recipe(threads=1)], ids=str)
def test_a_call_adds_nothing_to_the_state(recipe: Recipe, build: Build, images: torch.Tensor) -> None:
    called, other = build(recipe), build(recipe)
    before = list(called.state_dict())
    called(images)
    assert list(called.state_dict()) == before
    assert [name for name, _ in called.named_children()] == ["extractor"]
    other.load_state_dict(called.state_dict())


def test_a_table_that_must_have_the_dtype_of_the_weights_is_cast(build: Build) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(4, 8), persistent=False)
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(self.get_buffer("table"))

    x = torch.randn(4, 8)
    extractor = featx.create_feature_extractor(Table().eval(), ["linear"], example_inputs=x).eval()
    optimized = build(Recipe(dtype="bfloat16"), extractor, x)
    assert {buffer.dtype for buffer in optimized.buffers()} == {torch.bfloat16}
    errors = relative_errors({"linear": extractor(x)["linear"].detach()}, optimized(x))
    assert errors["linear"] < 3e-2


def test_linear_layers_by_onednn_take_no_samples(build: Build) -> None:
    x = torch.randn(2, 4)
    extractor = featx.create_feature_extractor(nn.Sequential(nn.Linear(4, 8)).eval(), ["0"], example_inputs=x).eval()
    assert build(Recipe(onednn=True), extractor, x)(x[:0])["0"].shape == (0, 8)


@pytest.mark.slow
def test_an_input_without_samples_is_not_computed_in_parts(build: Build) -> None:
    x = torch.randn(6, 5, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    extractor = featx.create_feature_extractor(nn.Sequential(layer), {"0": "y"}, example_inputs=x).eval()
    optimized = build(Recipe(rows=2), extractor, x)
    for inputs in (x, x[0]):
        errors = relative_errors({"y": extractor(inputs)["y"].detach()}, optimized(inputs))
        assert errors["y"] < 1e-5
