"""What is special to torchvision, einops, timm and transformers. None of them is imported here.

Classes and functions are known by the Python module that defines them, so that a library need not be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

import torch
from torch import nn

# Layers that read the mode for themselves alone: other code does not depend on it.
LAYERS = ("torch.nn.modules.", "torchvision.ops.")
# Namespaces of operators that compute their result from their arguments alone, unless they are tagged as random.
PURE_OPERATORS = frozenset({"torchvision"})
_MODELS_LIBRARIES = {"torch", "torchvision", "timm", "transformers"}
# Of timm and transformers: tokens that are pooled together stand side by side, or some are left out at random.
_REORDERING = frozenset({"Hiera", "HieraEncoder", "ViTMAEEmbeddings"})
# What the models of transformers call the input that says which places of a batch are no padding.
MASK_OF_PADDING = "attention_mask"
# The input of indices, with padding or without.
INDICES_OF_TEXT = "input_ids"
# Where transformers makes masks, and what it does that with.
_MASKS = "transformers.masking_utils"
_MASK_MAKERS = ("_vmap_expansion_sdpa", "TransformGetItemToIndex")
# Python modules whose cached functions log.
_LOGGING = frozenset({"transformers.utils.logging", "diffusers.utils.logging"})
# Functions that draw random numbers in training, and else return their input: where they take `training`.
_DRAWING_IN_TRAINING = {"torchvision.ops.stochastic_depth.stochastic_depth": 3}
_READ_ONLY = frozenset({"torchvision.ops.misc.SqueezeExcitation", "torchvision.ops.misc.FrozenBatchNorm2d"})


def resolve_feature_module(model: nn.Module, name: str) -> str:
    """Return which module a model of timm means by a name in its `feature_info`, some of which it does not have."""
    kind = type(model).__name__
    if kind == "MultiScaleVit":
        return name.replace("block.", "stages.", 1)
    if kind == "Twins":
        return name.replace("block.", "blocks.", 1)
    if kind == "TResNet" and not name:
        return "body.conv1"
    if kind == "CoaT" and name == "parallel_blocks":  # a list, whose last item returns all maps
        return f"{name}.{len(cast(Any, model).parallel_blocks) - 1}"
    if kind == "HighResolutionNet" and name.startswith("stage"):  # a map after the last stage, which has all of them
        has_own = getattr(model, "incre_modules", None) is not None
        return f"incre_modules.{int(name.removeprefix('stage')) - 1}" if has_own else "stage4"
    return name


def network_of_detector(model: nn.Module) -> str | None:
    """Return the path of the network that makes the maps of a detection model of torchvision; None for other models.

    These models resize their images, so that no value has a stride against them.
    """
    if not type(model).__module__.startswith("torchvision.models.detection.") or not hasattr(model, "transform"):
        return None
    paths = dict(model.named_modules())
    return next((path for path in ("backbone.body", "backbone.features", "backbone") if path in paths), None)


def trains_as_usual(module: nn.Module) -> bool:
    """Say whether `train` of a module of transformers does what that of torch does.

    It exchanges kernels afterwards, where `use_kernels` asks for special ones.
    """
    train = type(module).train
    is_of_base = (train.__module__, train.__qualname__) == ("transformers.modeling_utils", "PreTrainedModel.train")
    return is_of_base and not getattr(module, "use_kernels", True)


def tokens_are_in_order(modules: Iterable[nn.Module]) -> bool:
    """Say whether tokens stand in the order of the patches of the image, row by row, which is the custom."""
    return _REORDERING.isdisjoint(type(module).__name__ for module in modules)


def in_order(model: nn.Module, block: str) -> Callable[[Any], Any] | None:
    """Return what brings the tokens of a block of timm's Hiera into the order of the image, as NHWC; else None.

    The model has the means, for its `forward_intermediates`, and does not use them in `forward`.
    """
    reroll, number = getattr(model, "reroll", None), block.removeprefix("blocks.")
    if type(model).__module__ != "timm.models.hiera" or reroll is None or not number.isdigit():
        return None
    return partial(reroll, block_idx=int(number))


def is_read_only(kind: type[nn.Module]) -> bool:
    """Say whether modules of a class from outside of torch write neither their inputs nor their own state."""
    return f"{kind.__module__}.{kind.__qualname__}" in _READ_ONLY


def draws_in_training_only(kind: type[nn.Module]) -> bool:
    """Say whether modules of a class from outside of torch draw no random numbers in eval mode."""
    return kind.__module__.startswith("torchvision.ops.")


def training_argument_of(name: str) -> int | None:
    """Return where a function from outside of torch takes `training`, without which it returns its input; else None.

    With it, which is the default, the function draws random numbers. It writes nothing. `name` has its Python module.
    """
    return _DRAWING_IN_TRAINING.get(name)


def only_delegates_call(kind: type[nn.Module]) -> bool:
    """Say whether the `__call__` of a class runs no torch call before forward: that of the layers of transformers."""
    return kind.__call__.__module__ == "transformers.modeling_layers"


def reads_no_values_when_compiled(frame: FrameType) -> bool:
    """Say whether code that decides by values decides "no" under a compiler, without reading them.

    The code of transformers does that leaves out a mask without padding.
    """
    is_of_masks = frame.f_globals.get("__name__") == _MASKS
    return is_of_masks and "is_tracing" in frame.f_code.co_names


def collecting_hooks(module: nn.Module) -> list[Callable[..., None]]:
    """Return the forward hooks with which transformers collects hidden states and attentions of a layer.

    They add what the layer returns to a list, if code around it has asked for that, and do nothing else. So they run
    in a trace too, in which other hooks of modules that are one node do not.
    """
    if not module._forward_hooks:
        return []
    return [hook for hook in module._forward_hooks.values() if is_collecting_hook(hook)]


def is_collecting_hook(hook: object) -> bool:
    """Say whether a forward hook is one of `collecting_hooks`."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def only_collects(module: nn.Module) -> bool:
    """Say whether all forward hooks of a module are `collecting_hooks`, which the first call of a model registers."""
    return not module._forward_pre_hooks and all(map(is_collecting_hook, module._forward_hooks.values()))


def is_collecting_variable(variable: ContextVar[Any]) -> bool:
    """Say whether a context variable is that from which the hooks of `collecting_hooks` know what is asked for."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return collector is not None and getattr(collector, "context_var", collector) is variable


def is_logging(function: Any) -> bool:
    """Say whether a cached function logs each message once and returns nothing, as `warning_once` of transformers."""
    return str(function.__module__) in _LOGGING


def is_of_models_library(module: nn.Module) -> bool:
    """Say whether a module runs code of torch, torchvision, timm or transformers alone; not of what is inside it."""
    # A forward that is set on an instance may be any object.
    places = (type(module).__module__, getattr(module.forward, "__module__", None) or "")
    libraries = {place.partition(".")[0] for place in places}
    return libraries <= _MODELS_LIBRARIES and not isinstance(module, torch.jit.ScriptModule)


def is_of_einops(value: object) -> bool:
    """Say whether a value is a function of einops, which is one node."""
    return type(value) is FunctionType and str(value.__module__).startswith("einops")


def names_of_masks(namespaces: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Return where transformers names what it makes masks with by `torch.vmap`, for models of it: see `mask_maker`."""
    masks = sys.modules.get(_MASKS)
    if masks is None or not any(str(each.get("__name__")).startswith("transformers.") for each in namespaces):
        return []
    return [(masks.__dict__, name) for name in _MASK_MAKERS if name in masks.__dict__]


def mask_maker(function: Any) -> Callable[..., Any] | None:
    """Return what a trace calls in place of a function with which transformers makes masks by `torch.vmap`.

    Its own functions of masks compute from indices alone, so that indices which broadcast give the same. None for
    other functions.
    """
    if getattr(function, "__name__", "") not in _MASK_MAKERS:
        return None
    if isinstance(function, type):  # the mode in which tensors are items, which is of no use without vmap
        return nullcontext if function.__module__.startswith("torch.") else None
    return partial(_with_broadcasting, function) if function.__module__ == _MASKS else None


def _with_broadcasting(expansion: Callable[..., Any], mask: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of indices by batch, head, query and key, which returns the mask."""
    if not _is_of_transformers(mask):
        return expansion(mask)

    def by_index(*indices: Any) -> Any:
        count = len(indices)
        spread = [index[(None,) * at + (slice(None),) + (None,) * (count - 1 - at)] for at, index in enumerate(indices)]
        return mask(*spread).expand([index.shape[0] for index in indices])

    return by_index


def _is_of_transformers(value: object) -> bool:
    """Say whether a function, and those that it has from around it, are all of transformers."""
    if isinstance(value, tuple):
        return all(map(_is_of_transformers, cast("tuple[Any, ...]", value)))
    if not isinstance(value, FunctionType):
        return not callable(value)
    try:
        held = tuple([cell.cell_contents for cell in value.__closure__ or ()])
    except ValueError:  # one of them is empty
        return False
    return value.__module__.startswith("transformers.") and _is_of_transformers(held)


def globals_of_einops() -> dict[str, Any]:
    """Return the globals of einops where something has imported it, else an empty dict."""
    einops = sys.modules.get("einops")
    return einops.__dict__ if einops is not None else {}


def torchvision_operators() -> Any:
    """Return the Python module `torchvision.ops` where something has imported it, else None."""
    return sys.modules.get("torchvision.ops")


def advice_for(value: object) -> str:
    """Return what to do about an object that cannot be followed, or ""."""
    if type(value).__module__ == "transformers.cache_utils":
        return "run the model without a cache: pass use_cache=False and no past_key_values"
    return ""


def advice_for_code(namespace: dict[str, Any]) -> str:
    """Return what to do about code of a library that cannot be followed, by its globals, or ""."""
    if str(namespace.get("__name__")).partition(".")[0] == "accelerate":  # what device_map="auto" and offloading set up
        return (
            "load the model on one device, and take away the hooks with which accelerate moves inputs between devices: "
            "accelerate.hooks.remove_hook_from_submodules(model)"
        )
    return ""


def advice_for_draws(model: object) -> str:
    """Return what to do about a model that draws random numbers from numpy, or ""."""
    if getattr(getattr(model, "config", None), "apply_spec_augment", False):  # speech models of transformers
        return "set model.config.apply_spec_augment = False: SpecAugment draws from numpy in train mode"
    return ""


def passes_arguments_on(decorated: Any) -> bool:
    """Say whether what decorates a function is of transformers, and gives it the arguments that it is given.

    `deprecate_kwarg` gives them other names, and the others set options.
    """
    namespace = getattr(decorated, "__globals__", {})
    return str(namespace.get("__name__")).startswith("transformers.utils.")


def may_check_types() -> bool:
    """Say whether a library is loaded whose type checks draw from Python's generator: beartype."""
    return "beartype" in sys.modules


def advice_for_type_checks() -> str:
    """Return what to do where such checks may draw, or "" where no such library is loaded."""
    if not may_check_types():
        return ""
    return (
        "if beartype draws which item of a list[Tensor] or tuple[Tensor, ...] it checks, switch that check off by "
        "beartype(conf=BeartypeConf(strategy=BeartypeStrategy.O0)), or give a hint without items, such as list"
    )


def checks_types(code: CodeType) -> bool:
    """Say whether code is a function of beartype around another one. It draws which item of a list it checks.

    `list[Tensor]` and `tuple[Tensor, ...]` are such types. Nothing but the check depends on what it draws.
    """
    return code.co_filename.startswith("<@beartype(")


def advice_for_sizes(model: object) -> str:
    """Return what a model of timm offers for inputs of other sizes, as the end of a message, else ""."""
    if getattr(model, "dynamic_img_size", None) is False:  # vision transformers
        return "; timm.create_model takes img_size=..., or dynamic_img_size=True for any size"
    return "; timm.create_model may take img_size=..." if hasattr(model, "pretrained_cfg") else ""
