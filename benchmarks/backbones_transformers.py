"""Compare `featx.create_backbone` with the backbones of transformers, those that `AutoBackbone` makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import seeded
from parity_records import TRACED, Outcome, Record
from torch import nn

import featx

SAME_MODULE = "AutoBackbone"
PLAIN_MODEL = "AutoModel"
COMPARISONS = (SAME_MODULE, PLAIN_MODEL)
# Why a comparison is not equal, where that is known.
REASONS = {
    ("focalnet", PLAIN_MODEL): "AutoBackbone's maps are after the downsampling of a stage; strides 8, 16, 32 and 32",
    ("hiera", PLAIN_MODEL): "the model's tokens are in an order of their own, so it has one map that is known",
    ("swin", PLAIN_MODEL): "AutoBackbone calls the model with always_partition=True, which shifts windows in stage 4",
}
_NOT_COMPARABLE = "not comparable"
_MOST_MAPS = 4
# Parts of plain models that come after all maps.
_FINAL_NORMS = {"layernorm", "layer_norm", "norm"}
_BEHIND_THE_MAPS = {*_FINAL_NORMS, "pooler", "head"}


def list_types() -> list[str]:
    """Return the types of all configs that AutoBackbone knows, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_BACKBONE_MAPPING_NAMES

    return sorted(set(MODEL_FOR_BACKBONE_MAPPING_NAMES) - {"timm_backbone"})  # those of timm have a table of their own


_Compare = Callable[[nn.Module, torch.Tensor, Sequence[torch.Tensor]], str]
_Outcome = Callable[[Callable[[], str]], Outcome]


def fill_in(record: Record, outcome: _Outcome, compared: _Compare) -> None:
    """Fill in whether the backbone of the module, and of the plain model with its weights, is what transformers has.

    Args:
        record: names the type, and takes the outcomes.
        outcome: calls a function and makes an `Outcome` of what it returns or raises.
        compared: compares what a backbone returns for an image with other maps.
    """
    theirs = _build(record.model)
    image = torch.rand(2, 3, *_sides(theirs.config), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), seeded():
        maps = theirs(image).feature_maps
    record.parameters = sum(parameter.numel() for parameter in theirs.parameters())
    record.pixels = image.shape[-1]
    record.featx = TRACED
    record.modes[SAME_MODULE] = outcome(
        lambda: compared(
            featx.create_backbone(theirs, example_inputs=image), image, [_as_map(each, image) for each in maps]
        )
    )
    record.modes[PLAIN_MODEL] = _of_plain_model(theirs, image, outcome, compared)


def _of_plain_model(theirs: Any, image: torch.Tensor, outcome: _Outcome, compared: _Compare) -> Outcome:
    from transformers import AutoModel

    config: Any = theirs.config
    try:
        plain = AutoModel.from_config(config).eval()
    except ValueError:  # AutoModel does not know the type: there is the backbone alone
        return Outcome(_NOT_COMPARABLE, "transformers has no other model of the type")
    if not _share_weights(theirs, plain):
        return Outcome(_NOT_COMPARABLE, "the plain model has other weights")
    _leave_out_norms(theirs, type(plain))
    with torch.no_grad(), seeded():
        maps = theirs(image).feature_maps
    strides = [image.shape[-1] // each.shape[-1] for each in maps]
    blocks = [int(name.removeprefix("stage")) - 1 for name in config.out_features]
    chosen: dict[str, Any] = {"strides": strides} if len(set(strides)) == len(strides) > 1 else {"blocks": blocks}
    return outcome(lambda: compared(featx.create_backbone(plain, **chosen, example_inputs=image), image, maps))


def _build(kind: str) -> Any:
    """Return a backbone of the type's own size, with up to four maps at equal distances."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.CONFIG_MAPPING[kind]()
    config = getattr(config, "vision_config", config)
    lists = {name: list(value) for name, value in vars(config).items() if isinstance(value, tuple) and name != "shape"}
    for name, value in lists.items():
        setattr(config, name, value)  # some add a list to it
    names = [name for name in config.stage_names if name != "stem"]
    if len(names) > _MOST_MAPS + 1:
        names = [names[len(names) * part // _MOST_MAPS - 1] for part in range(1, _MOST_MAPS + 1)]
    config.out_features = names
    with seeded():
        return transformers.AutoBackbone.from_config(config).eval()


def _sides(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", 224)
    return (size, size) if isinstance(size, int) else tuple(size)


def _as_map(value: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Return a map; ViTPose returns the tokens of the patches."""
    if value.dim() == 4:
        return value
    stride = int((image.shape[2] * image.shape[3] // value.shape[1]) ** 0.5)
    return value.transpose(1, 2).unflatten(2, (image.shape[2] // stride, image.shape[3] // stride))


def _share_weights(theirs: nn.Module, plain: nn.Module) -> bool:
    """Give the plain model the weights of the backbone; return whether there is one for each that its maps need.

    Some backbones are built as the plain model is, and others have it inside them.
    """
    state = theirs.state_dict()
    for prefix in ("", *(f"{name}." for name, _ in theirs.named_children())):
        inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        missing = plain.load_state_dict(inner, strict=False).missing_keys
        if all(name.split(".")[0] in _BEHIND_THE_MAPS for name in missing):
            return True
    return False


def _leave_out_norms(theirs: Any, plain: type[nn.Module]) -> None:
    """Let a backbone return its maps without the norms that it has for them alone, and without the final one."""
    theirs.config.apply_layernorm = False
    norms = getattr(theirs, "hidden_states_norms", nn.ModuleDict())
    for name in dict(norms.named_children()):
        norms._modules[name] = nn.Identity()
    for module in (theirs, *(child for child in theirs.children() if isinstance(child, plain))):
        for name in _FINAL_NORMS & dict(module.named_children()).keys():
            setattr(module, name, nn.Identity())
