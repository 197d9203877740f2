"""Vision-language models of transformers, made in the plain way: with images, in texts of any form, and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import featx
from featx.examples import find_example
from featx.libraries import mask_maker

pytestmark = pytest.mark.sweep

transformers: Any = pytest.importorskip("transformers")

IMAGE, VIDEO, START, END = 99, 98, 97, 96
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 120,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip


def llava() -> nn.Module:
    vision = transformers.CLIPVisionConfig(**VISION)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_id=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_next() -> nn.Module:
    """Cuts images into tiles."""
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        image_grid_pinpoints=[[32, 64], [64, 32], [64, 64]],
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def gemma3() -> nn.Module:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**TEXT, head_dim=8),
        vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def smolvlm() -> nn.Module:
    """Takes several images a text, and leaves out those that are empty."""
    text = transformers.LlamaConfig(**TEXT, pad_token_id=0)
    config = transformers.SmolVLMConfig(text_config=text, vision_config=VISION, image_token_id=IMAGE, scale_factor=2)
    return transformers.SmolVLMForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    """Takes the patches of all images in a row, and the grid of each."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


MODELS = [llava, llava_next, gemma3, smolvlm, qwen2_vl]


def _made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def _guessed(model: nn.Module) -> dict[str, Any]:
    """Return the inputs that featx finds, as a user gives them."""
    example = find_example(model)
    assert example is not None
    return {name: value for name, value in example.kwargs.items() if name != "use_cache"}


def _layers(model: nn.Module) -> list[str]:
    """Return the paths of the second layers of the two parts, which see images and text."""
    paths = [path for path, _ in model.named_modules() if path.endswith((".layers.1", ".blocks.1"))]
    return sorted(paths, key=lambda path: "vision" not in path and "visual" not in path)


def _by_hooks(model: nn.Module, paths: list[str], inputs: dict[str, Any]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(lambda module, args, out, path=path: seen.update({path: out}))
        for path in paths
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


def _tensor(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def _check(extractor: nn.Module, model: nn.Module, paths: list[str], inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        out = extractor(**inputs)
    expected = _by_hooks(model, paths, inputs)
    for path in paths:
        assert torch.equal(_tensor(out[path]), _tensor(expected[path])), path


@pytest.mark.parametrize("build", MODELS)
def test_guessed_inputs_are_an_image_in_a_text_and_run(build: Callable[[], nn.Module]) -> None:
    model = _made(build)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example = find_example(model)
    assert example is not None
    assert "pixel_values" in example.kwargs
    assert (example.kwargs["input_ids"] == IMAGE).any(1).all()
    with torch.no_grad():
        model(**example.kwargs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("build", [llava, llava_next, smolvlm, qwen2_vl])
def test_layers_of_both_parts_are_found_and_exact(build: Callable[[], nn.Module]) -> None:
    model = _made(build)
    vision, text = _layers(model)
    inputs = _guessed(model)
    extractor = featx.create_feature_extractor(model, [vision, text])
    _check(extractor, model, [vision, text], inputs)
    ids = inputs["input_ids"].clone()
    ids[:, -3:] = 7
    others = {**inputs, "input_ids": ids, "pixel_values": torch.rand_like(inputs["pixel_values"])}
    _check(extractor, model, [vision, text], others)


@pytest.mark.parametrize("build", [llava, gemma3, qwen2_vl])
def test_text_alone_and_a_longer_text_with_an_image(build: Callable[[], nn.Module]) -> None:
    model = _made(build)
    _, text = _layers(model)
    inputs = _guessed(model)
    extractor = featx.create_feature_extractor(model, [text])
    _check(extractor, model, [text], {"input_ids": torch.tensor([[5, 9, 7, 3], [4, 8, 2, 6]])})
    longer = {
        name: torch.cat([value[:, :1], value], 1) if value.shape == inputs["input_ids"].shape else value
        for name, value in inputs.items()
    }
    _check(extractor, model, [text], longer)


def test_masks_that_transformers_makes_by_vmap() -> None:
    model = _made(gemma3)
    vision, text = _layers(model)
    inputs = _guessed(model)
    types = inputs["token_type_ids"]
    assert torch.equal(types, (inputs["input_ids"] == IMAGE).long())
    without = _by_hooks(model, [text], {name: value for name, value in inputs.items() if value is not types})
    assert not torch.equal(_tensor(without[text]), _tensor(_by_hooks(model, [text], inputs)[text]))
    extractor = featx.create_feature_extractor(model, [vision, text])
    padded = inputs["attention_mask"].clone()
    padded[1, :2] = 0
    for mask in (inputs["attention_mask"], padded):
        _check(extractor, model, [vision, text], {**inputs, "attention_mask": mask})


def test_masks_of_other_functions_than_those_of_transformers_are_not_broadcast() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    maker = mask_maker(masking._vmap_expansion_sdpa)
    assert maker is not None
    indices = [torch.arange(length) for length in (2, 1, 5, 4)]

    def by_sum(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query + torch.arange(3)).sum() > 5 * key  # of one query under vmap, of all without

    sliding = masking.sliding_window_causal_mask_function(3)
    for mask in (sliding, by_sum, masking.or_masks(sliding, by_sum)):
        assert torch.equal(maker(mask)(*indices), masking._vmap_expansion_sdpa(mask)(*indices))


def test_token_of_images_that_the_text_does_not_have_gives_text_alone() -> None:
    model = _made(llava)
    model.config.image_token_id = 500
    example = find_example(model)
    assert example is not None
    assert "pixel_values" not in example.kwargs


def test_an_image_that_the_model_asserts_against_is_no_example() -> None:
    def assert_size(**images: Tensor) -> None:
        raise AssertionError("Input height (224) does not match that of the model (32)")

    model = llava()
    model.get_image_features = assert_size
    example = find_example(model)
    assert example is None or "pixel_values" not in example.kwargs
