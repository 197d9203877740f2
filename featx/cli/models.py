"""Make a model of what somebody types: torchvision:resnet50, timm:..., hf:FOLDER, package.module:function."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from featx.cli.errors import UserError
from featx.cli.options import FORMS
from featx.ir.paths import did_you_mean

# Under which keys training scripts store a state dict beside other things.
_NAMES_OF_STATE = ("state_dict", "model_state_dict", "model")


def load_model(spec: str, *, pretrained: bool, weights: Path | None, seed: int | None) -> nn.Module:
    """Return the model, in eval mode.

    Args:
        spec: what was typed, in one of `FORMS`.
        pretrained: load the weights that the library offers.
        weights: a file with a state dict, of safetensors or of torch.
        seed: of random weights.

    Raises:
        UserError: there is no such model, a library is missing, or the weights do not fit.
    """
    if pretrained and weights is not None:
        raise UserError("give --pretrained or --weights, not both")
    library, separator, name = spec.partition(":")
    if not separator or not name:
        raise UserError(f"'{spec}' names no model; write one of {FORMS}")
    if seed is not None:
        try:
            torch.manual_seed(seed)
        except (ValueError, RuntimeError) as error:
            raise UserError(f"--seed must be an integer of 64 bits, got {seed}") from error
    make = {"torchvision": _of_torchvision, "timm": _of_timm, "hf": _of_transformers}.get(library)
    model = make(name, pretrained) if make is not None else _of_function(library, name, pretrained=pretrained)
    if weights is not None:
        _load_weights(model, weights)
    return model.eval()


def _of_torchvision(name: str, pretrained: bool) -> nn.Module:
    models: Any = _library("torchvision.models", "torchvision")
    _require_known(name, models.list_models(), "torchvision")
    if pretrained:
        return _with_weights(name, lambda: models.get_model(name, weights="DEFAULT"))
    # Models for detection and segmentation load the weights of their backbone on their own.
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    none = {option: None for option in ("weights", "weights_backbone") if option in parameters}
    return models.get_model(name, **none)


def _of_timm(name: str, pretrained: bool) -> nn.Module:
    timm: Any = _library("timm", "timm")
    if not name.startswith("hf-hub:"):
        _require_known(name.partition(".")[0], timm.list_models(), "timm")
    if pretrained:
        return _with_weights(name, lambda: timm.create_model(name, pretrained=True))
    try:
        return timm.create_model(name, pretrained=False)
    except Exception as error:  # timm raises RuntimeError for an unknown tag, and each model errors of its own
        raise UserError(f"timm cannot make '{name}': {type(error).__name__}: {_short(error)}") from error


def _with_weights(name: str, make: Callable[[], nn.Module]) -> nn.Module:
    try:
        return make()
    except Exception as error:  # each library and its way to the network has errors of its own
        raise UserError(f"the weights of '{name}' cannot be loaded: {type(error).__name__}: {_short(error)}") from error


# Files in which transformers saves weights; larger ones in parts, with an index.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def _of_transformers(name: str, pretrained: bool) -> nn.Module:
    transformers: Any = _library("transformers", "transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        if pretrained or any(Path(name, f"{file}{end}").exists() for file in _WEIGHTS for end in ("", ".index.json")):
            return transformers.AutoModel.from_pretrained(name)
        return transformers.AutoModel.from_config(config)
    except OSError as error:
        raise UserError(f"transformers has no model '{name}': {str(error).splitlines()[0]}") from error
    except Exception as error:  # a configuration that its class does not take
        raise UserError(f"transformers cannot make '{name}': {type(error).__name__}: {_short(error)}") from error


def _of_function(module: str, name: str, *, pretrained: bool) -> nn.Module:
    if pretrained:
        raise UserError(f"--pretrained is for models of libraries; let '{module}:{name}' load its weights itself")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"there is no Python module '{error.name}'; a model is one of {FORMS}") from error
    except Exception as error:
        raise UserError(f"'{module}' cannot be imported: {_raised(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    function = getattr(found, name, None)
    if function is None:
        raise UserError(f"'{module}' has no '{name}'.{did_you_mean(name, dir(found))}")
    if not callable(function):
        raise UserError(f"'{module}:{name}' is of {type(function).__name__}, and neither a model nor what makes one")
    try:
        model = function if isinstance(function, nn.Module) else function()
    except TypeError as error:
        raise UserError(f"'{module}:{name}' has to make a model without arguments: {_raised(error)}") from error
    except Exception as error:
        raise UserError(f"'{module}:{name}' makes no model: {_raised(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"'{module}:{name}' gives a {type(model).__name__}, and no nn.Module")
    return model


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{package} is not installed: pip install {package}") from error


def _require_known(name: str, known: Iterable[str], library: str) -> None:
    names = list(known)
    if name in names:
        return
    longer = sorted((each for each in names if each.startswith(name)), key=len)
    hint = f" Did you mean {' or '.join(map(repr, longer[:3]))}?" if longer else did_you_mean(name, names)
    hint += f" {len(longer) - 3} more start with '{name}'." if len(longer) > 3 else ""
    raise UserError(f"{library} has no model '{name}'.{hint}")


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.exists():
        raise UserError(f"there is no file '{path}'")
    load: Callable[[], Any]
    if path.suffix == ".safetensors":
        load_file = _library("safetensors.torch", "safetensors").load_file
        load = lambda: load_file(path)  # noqa: E731
    else:
        load = lambda: torch.load(path, map_location="cpu", weights_only=True)  # noqa: E731
    try:
        state = load()
    except Exception as error:  # whatever another file leads to
        raise UserError(f"'{path}' is no file of weights, of safetensors or torch.save: {_short(error)}") from error
    try:
        if isinstance(state, dict):
            held = cast("dict[str, Any]", state)
            state = next((held[name] for name in _NAMES_OF_STATE if name in held), held)
            _remove_prefix(state, next(iter(model.state_dict()), ""))
        model.load_state_dict(state)
    except Exception as error:  # whatever a file that is no state dict leads to
        raise UserError(f"'{path}' does not fit the model: {_short(error)}") from error


def _remove_prefix(state: dict[str, Any], key: str) -> None:
    """Remove what stands before all keys: "module." of data parallel models, "model." of a Lightning module.

    Args:
        state: a state dict, which is changed.
        key: the first key that the model has.
    """
    first = next((each for each in state if each.endswith("." + key)), key)
    prefix = first.removesuffix(key)
    if prefix and all(each.startswith(prefix) for each in state):
        consume_prefix_in_state_dict_if_present(state, prefix)


def _raised(error: Exception) -> str:
    """Return an error and the line that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {_short(error)}, in {place.filename}:{place.lineno}"


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300] or type(error).__name__
