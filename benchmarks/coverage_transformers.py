"""Turn the type of a transformers config into a small model that runs, and its inputs.

Configs are made small by guessing, and inputs are found by featx. `coverage_configs.json` has both for types for which
that does not fit.
"""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from models import seeded
from torch import nn

from featx.examples import Example, find_example

# What the message of the error begins with where the guesses of this file do not fit; the report lists these apart.
DOES_NOT_RUN = "does not run"
_LARGEST = 100_000_000
# What makes a model small: layers, experts and how many of these a token takes; all are counts, so a minimum is taken.
_DEPTHS = set(
    """num_hidden_layers n_layer n_layers encoder_layers decoder_layers num_layers num_encoder_layers num_decoder_layers
    depth encoder_num_hidden_layers decoder_num_hidden_layers num_blocks_per_stage text_layers num_adapter_layers
    speech_encoder_layers memory_attention_num_layers prelude_layers num_local_layers text_encoder_num_layers
    t2u_encoder_layers t2u_decoder_layers num_postnet_layers""".split()
)
_COUNTS = {
    **dict.fromkeys(_DEPTHS, 2),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts moe_num_experts num_experts_total".split(), 4),
    **dict.fromkeys("num_experts_per_tok moe_topk moe_k top_k_experts".split(), 2),
    "first_k_dense_replace": 1,
}
_FIXED = {"n_group": 1, "topk_group": 1, "attn_layer_offset": 1}
_WIDTHS = {
    **dict.fromkeys(
        """hidden_size d_model n_embd embed_dim dim n_embed encoder_hidden_size decoder_hidden_size hidden_dim
        embedding_size out_hidden_size width text_hidden_size vision_hidden_size hidden_dim_size""".split(),
        64,
    ),
    **dict.fromkeys(
        """num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads
        encoder_num_attention_heads decoder_num_attention_heads attention_heads""".split(),
        4,
    ),
    "num_key_value_heads": 2,
    **dict.fromkeys("head_dim d_kv".split(), 16),
    **dict.fromkeys(
        """intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner mlp_dim moe_intermediate_size
        shared_expert_intermediate_size ffn_hidden_size ffn_size shared_intermediate_size decoder_intermediate_size
        projection_dim""".split(),
        96,
    ),
}
# Their rotary embeddings have sections that add up to a head of 128, or in Glm to half of one.
_SECTIONED = ("Qwen2", "Paddl", "GlmOc", "Glm4v", "GlmIm", "Glm46", "Glmga")
_SECTIONED_WIDTHS = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128}
_GLM_WIDTHS = {**_SECTIONED_WIDTHS, "num_attention_heads": 4, "head_dim": 64}


_BY_HAND = Path(__file__).with_name("coverage_configs.json")


def list_types() -> list[str]:
    """Return the types of all configs that AutoModel knows, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def build_running(kind: str) -> tuple[nn.Module, Example | None]:
    """Return a small model of the type in eval mode, and inputs with which it runs.

    As `coverage_configs.json` says, for types that are in it. Others are tried with few layers and small widths, then
    with few layers only, which fits configs whose widths depend on each other, if that has not more than 100 million
    parameters.

    Raises:
        ValueError: neither is built and runs; the message says why.
    """
    if kind in _by_hand():
        return _build_by_hand(kind)
    problems: list[str] = []
    for is_narrow in (True, False):
        try:
            size = sum(parameter.numel() for parameter in _build(kind, is_narrow, "meta").parameters())
            if size > (3 if is_narrow else 1) * _LARGEST:
                problems.append(f"{size / 1e6:.0f} million parameters")
                continue
            model = _build(kind, is_narrow, "cpu")
            example = find_example(model)
            if example is None:
                problems.append("no example is found")
                continue
            with torch.no_grad(), seeded():
                model(*example.args, **example.kwargs)
        except Exception as error:  # configs are scaled by guessing; many do not fit
            problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}"[:150])
            continue
        return model, find_example(model)
    raise ValueError(f"{DOES_NOT_RUN}: {'; with the widths as they are: '.join(problems)}")


@functools.lru_cache(maxsize=1)
def _by_hand() -> dict[str, Any]:
    return json.loads(_BY_HAND.read_text())


def _build_by_hand(kind: str) -> tuple[nn.Module, Example]:
    import transformers

    given = _by_hand()[kind]
    model = _from_config(transformers.CONFIG_MAPPING[kind](**given["config"]), "cpu")
    generator = torch.Generator().manual_seed(0)
    inputs = {name: _tensor(described, generator) for name, described in given["inputs"].items()}
    example = Example((), inputs, _BY_HAND.name)
    with torch.no_grad(), seeded():
        model(**inputs)
    return model, example


def _tensor(described: Any, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor that a list of numbers describes, or the shape of what it is filled with."""
    if not isinstance(described, dict):
        return torch.tensor(described)
    kind = getattr(torch, described.get("dtype", "float32"))
    if "random" in described:
        return torch.rand(described["random"], generator=generator, dtype=kind)
    return (
        torch.ones(described["ones"], dtype=kind)
        if "ones" in described
        else torch.zeros(described["zeros"], dtype=kind)
    )


def leave_out_cache(model: nn.Module) -> bool:
    """Let a model, which is changed, return no cache; return whether it did."""
    configs = [module.config for module in model.modules() if getattr(getattr(module, "config", None), "use_cache", 0)]
    for config in configs:
        config.use_cache = False
    return bool(configs)


def _build(kind: str, is_narrow: bool, device: str) -> nn.Module:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    config = transformers.CONFIG_MAPPING[kind]()
    return _from_config(type(config)(**_scaled(config, is_narrow)), device)


def _from_config(config: Any, device: str) -> nn.Module:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    with seeded(), torch.device(device):
        return transformers.AutoModel.from_config(config).eval()


def _scaled(config: Any, is_narrow: bool) -> dict[str, Any]:  # Any: transformers has no type for what a config holds
    values = vars(config)
    fields = set(getattr(type(config), "__dataclass_fields__", {}))
    depths = {value for name, value in values.items() if name in _DEPTHS and isinstance(value, int)}
    has_widths_by_stage = any(
        isinstance(values.get(name), (list, tuple)) for name in ("num_heads", "num_attention_heads")
    )
    scaled: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "to_dict"):
            inner = _scaled(value, is_narrow)
            scaled[name] = {"model_type": value.model_type, **inner} if value.model_type else inner
        elif name not in fields or isinstance(value, bool):
            continue
        elif isinstance(value, int):
            if name in _COUNTS:
                scaled[name] = min(value, _COUNTS[name])
            elif name in _FIXED:
                scaled[name] = _FIXED[name]
            elif is_narrow and name in _WIDTHS and not (has_widths_by_stage and name in ("hidden_size", "embed_dim")):
                scaled[name] = min(value, _width(config, name, value))
        elif isinstance(value, (list, tuple)):
            if len(value) in depths and len(value) > 2 and ("layer" in name or "types" in name or "attention" in name):
                scaled[name] = _two_kinds(value)
            elif name == "depths" and is_narrow:
                scaled[name] = [1] * len(value)
    text, vision = scaled.get("text_config", {}), scaled.get("vision_config", {})
    if "hidden_size" in text and "out_hidden_size" in vision:  # what an image becomes among the tokens of a text
        vision["out_hidden_size"] = text["hidden_size"]
    return scaled


def _width(config: Any, name: str, value: int) -> int:
    kind = type(config).__name__
    if name == "num_key_value_heads" and value in (1, config.num_attention_heads):
        return 1 if value == 1 else 4
    if kind.startswith(_SECTIONED) or "mrope_section" in str(getattr(config, "rope_parameters", None)):
        widths = _GLM_WIDTHS if kind.startswith("Glm") else _SECTIONED_WIDTHS
        return widths.get(name, _WIDTHS[name])
    return _WIDTHS[name]


def _two_kinds(layers: Any) -> list[Any]:
    """Return the first two kinds of layers, or the first two layers where there is one kind only."""
    other = next((layer for layer in layers[1:] if layer != layers[0]), layers[1])
    return [layers[0], layers[1] if layers[1] != layers[0] else other]
