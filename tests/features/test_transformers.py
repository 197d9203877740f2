"""Models of transformers: features as forward hooks see them, at the traced size and at another one."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import featx
from featx.tracing.replica.replica import only_sets_flags

pytestmark = pytest.mark.sweep

transformers: Any = pytest.importorskip("transformers")

TOKENS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 90,
}
MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: options, and two modules whose outputs are asked for
    "Bert": (TOKENS, "encoder.layer.0", "encoder.layer.1"),
    "Llama": ({**TOKENS, "num_key_value_heads": 2}, "layers.0", "norm"),
    "Gemma2": ({**TOKENS, "num_key_value_heads": 2, "head_dim": 16}, "layers.0.mlp", "norm"),
    "Mixtral": ({**TOKENS, "num_key_value_heads": 2, "num_local_experts": 2}, "layers.0", "norm"),
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 90}, "h.0.mlp", "ln_f"),
    "DistilBert": (
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "vocab_size": 90}, "transformer.layer.0",
        "transformer.layer.1",
    ),
}  # fmt: skip


def seeded(name: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)).eval()


def hooked(model: nn.Module, paths: tuple[str, ...], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def keep(path: str) -> Any:
        return lambda module, args, output: found.update({path: first(output).clone()})

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    # As the extractor: a cache copies the keys, and some kernels round otherwise for another layout.
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    model(tokens, **({"use_cache": False} if has_cache else {}))
    for handle in handles:
        handle.remove()
    return found


def first(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_that_hooks_see_for_other_batches_and_lengths(name: str) -> None:
    options, *paths = MODELS[name]
    model = seeded(name, options)
    example = torch.randint(0, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    extractor = featx.create_feature_extractor(model, list(paths), example_inputs=example)
    for rows, length in ((2, 11), (1, 11), (3, 7)):
        tokens = torch.randint(0, 90, (rows, length), generator=torch.Generator().manual_seed(length))
        features, expected = extractor(tokens), hooked(model, tuple(paths), tokens)
        for path in paths:
            assert torch.equal(first(features[path]), expected[path]), (path, rows, length)


def test_names_of_bert_go_down_to_every_linear_layer() -> None:
    model = seeded("Bert", TOKENS)
    names, _ = featx.get_graph_node_names(model, example_inputs=torch.randint(0, 90, (2, 11)))
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert linear <= set(names)


def test_hooks_that_forward_registers_do_not_stay() -> None:
    # transformers collects hidden states with hooks that its first call registers.
    model = seeded("Llama", MODELS["Llama"][0])
    tokens = torch.randint(0, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": tokens, "output_hidden_states": True}
    for _ in range(2):
        featx.get_graph_node_names(model, example_inputs=example)
        assert not any(module._forward_hooks for module in model.modules())
    assert len(model(tokens, output_hidden_states=True).hidden_states) == 3


def segformer() -> Any:
    torch.manual_seed(0)
    options = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}
    return transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**options)).eval()


@pytest.mark.parametrize("has_run", [False, True], ids=["new", "has run"])
@pytest.mark.parametrize("path", ["decode_head.classifier", "decode_head", "segformer.stages.1"])
def test_hidden_states_that_transformers_collects_with_hooks_are_followed(path: str, has_run: bool) -> None:
    model, images = segformer(), torch.rand(1, 3, 64, 64)
    if has_run:
        model(images)  # which installs the hooks
    hooks = [len(module._forward_hooks) for module in model.modules()]
    extractor = featx.create_feature_extractor(model, [path], example_inputs=images)
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    for x in (images, torch.rand(2, 3, 64, 64)):
        expected = hooked(segformer(), (path,), x)[path]
        assert torch.equal(first(extractor(x)[path]), expected)


def test_hooks_that_the_first_run_of_a_model_registers_keep_no_parts_in_an_extractor() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    tokens = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    texts, images = {**sizes, **tokens}, {**sizes, "image_size": 16, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=texts, vision_config=images)).eval()
    inputs = {"input_ids": torch.randint(3, 40, (2, 5)), "pixel_values": torch.rand(2, 3, 16, 16)}
    path = "text_model.encoder.layers.0"
    extractors = [featx.create_feature_extractor(model, [path], example_inputs=inputs)]
    expected = model(**inputs, output_hidden_states=True).text_model_output.hidden_states[1]
    assert any(module._forward_hooks for module in model.vision_model.modules())
    extractors.append(featx.create_feature_extractor(model, [path], example_inputs=inputs))
    for extractor in extractors:
        assert not any("vision_model" in name for name in extractor.state_dict())
        assert torch.equal(first(extractor(**inputs)[path]), expected)


@pytest.mark.parametrize("path", ["model.layers.0", "model.layers.1.mlp"])
def test_what_transformers_collects_inside_of_layers_that_are_kept_whole_is_followed(path: str) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **TOKENS, num_key_value_heads=2, num_local_experts=2, output_router_logits=True, max_position_embeddings=32
    )
    model = transformers.MixtralForCausalLM(config).eval()
    example = {"input_ids": torch.randint(5, 90, (1, 6)), "use_cache": False}
    extractor = featx.create_feature_extractor(copy.deepcopy(model), [path, "output"], example_inputs=example)
    for shape in ((1, 6), (1, 6), (1, 12), (3, 5)):
        inputs = {"input_ids": torch.randint(5, 90, shape), "use_cache": False}
        with torch.no_grad():
            found, expected = extractor(**inputs)["output"], copy.deepcopy(model)(**inputs)
        assert torch.equal(found["aux_loss"], expected.aux_loss)
        for one, other in zip(found["router_logits"], expected.router_logits, strict=True):
            assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_of_the_caller_that_the_model_fills_is_refused(name: str) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    extractor = featx.create_feature_extractor(model, {"output": "all"})
    with pytest.raises(featx.TraceError, match="run the model without a cache"):
        extractor(input_ids=torch.tensor([[1]]), **{name: transformers.DynamicCache()})


def test_options_among_keyword_arguments_are_those_of_the_example_unless_they_are_given() -> None:
    model = seeded("Bert", TOKENS)
    tokens = torch.randint(0, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": tokens, "output_hidden_states": True}  # forward takes it in **kwargs
    extractor = featx.create_feature_extractor(model, {"output": "all"}, example_inputs=example)
    for inputs in ({"input_ids": tokens}, example):
        found, expected = extractor(**inputs)["all"].hidden_states, model(**example).hidden_states
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
    assert extractor(input_ids=tokens, output_hidden_states=False)["all"].hidden_states is None


def test_vision_language_model_with_and_without_a_cache() -> None:
    torch.manual_seed(0)
    vision = {**TOKENS, "image_size": 32, "patch_size": 8}
    del vision["vocab_size"]
    text = transformers.LlamaConfig(**TOKENS, num_key_value_heads=2)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision), text_config=text, image_token_id=7
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    tokens = torch.randint(10, 89, (2, 24))
    tokens[:, 2:18] = 7
    inputs = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": torch.rand(2, 3, 32, 32),
    }
    path = "model.language_model.layers.1"
    seen: dict[str, Any] = {}
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: seen.update({path: output}))
    model(**inputs, use_cache=False)
    handle.remove()
    for example in (inputs, {**inputs, "use_cache": False}):
        extractor = featx.create_feature_extractor(model, [path], example_inputs=example)
        for options in ({}, {"use_cache": False}):
            assert torch.equal(first(extractor(**inputs, **options)[path]), first(seen[path]))


@pytest.mark.parametrize("example", [None, "ids", "mask", "labels"])
def test_output_of_a_causal_model_needs_no_word_on_its_cache(example: str | None) -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(1, 20, (2, 5))
    given = {"ids": ids, "mask": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
    given["labels"] = {"input_ids": ids, "labels": ids}
    extractor = featx.create_feature_extractor(
        model, ["transformer.h.0", "output"], example_inputs=None if example is None else given[example]
    )
    with torch.no_grad():
        found, expected = extractor(input_ids=ids)["output"], model(input_ids=ids)
    assert torch.equal(found.logits, expected.logits)
    asked = {"input_ids": ids, "use_cache": True}
    extractor = featx.create_feature_extractor(model, ["transformer.h.0", "output"], example_inputs=asked)
    with torch.no_grad():
        ours, theirs = extractor(**asked)["output"].cache.layers, model(**asked).cache.layers
    assert len(ours) == len(theirs) == 2
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our.keys, their.keys)
        assert torch.equal(our.values, their.values)


def test_train_of_transformers_sets_flags_unless_it_exchanges_kernels() -> None:
    class Merges(transformers.BertModel):  # type: ignore[misc]
        def train(self, mode: bool = True) -> Any:
            self.merged = not mode
            return super().train(mode)

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    assert only_sets_flags(model)
    assert not only_sets_flags(Merges(config))
    extractor = featx.create_feature_extractor(model, ["encoder.layer.1"])
    ids = torch.randint(0, 50, (3, 7))
    for training in (False, True):
        expected = model.train(training)(ids).last_hidden_state
        assert torch.equal(extractor.train(training)(input_ids=ids)["encoder.layer.1"], expected)
    model._use_kernels = True
    assert not only_sets_flags(model)
