"""What a module that is called whole writes, may share memory with, and draws, by its class and options."""

from __future__ import annotations

from torch import nn

from featx.ir.modules import modules_of
from featx.ir.torch_layers import DROPOUTS, is_torch_layer
from featx.libraries import draws_in_training_only, is_read_only

# Leaf modules of torch.nn whose result may be their input or a view of it.
_VIEW_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Upsample, nn.ParameterList, nn.ParameterDict)
_DRAW_IN_TRAINING = (*DROPOUTS, nn.RReLU)
_DRAWING_MODULES = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def module_effects(module: nn.Module) -> tuple[bool, bool]:
    """Say whether a module called whole may write its inputs, and whether its result may share their memory."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for child in module:
            writes, shares = module_effects(child)
            if writes or not shares:
                return writes, shares
        return False, True
    if is_read_only(type(module)):
        return False, False
    if any(not is_torch_layer(type(part)) or "forward" in part.__dict__ for part in modules_of(module)):
        return True, True
    if module.__dict__.get("inplace"):
        return True, True
    return False, isinstance(module, _VIEW_MODULES + _DRAW_IN_TRAINING)


def module_draws(module: nn.Module, training: bool | None = None) -> bool:
    """Say whether a module itself, without those inside it, may draw random numbers when it is called.

    With `training`, when it is called in that mode, which may be another one than it is in.
    """
    training = module.training if training is None else training
    is_of_torch = is_torch_layer(type(module))
    if isinstance(module, _DRAW_IN_TRAINING) or (is_of_torch and module.__dict__.get("dropout")):
        return training
    if draws_in_training_only(type(module)):
        return training
    # A container runs nothing of its own; a module of somebody's own may draw in either mode.
    is_known = is_of_torch or type(module).forward is nn.Sequential.forward
    return not is_known or isinstance(module, _DRAWING_MODULES)


def module_writes_state(module: nn.Module) -> bool:
    """Say whether a module itself, without those inside it, may write its parameters or buffers when it is called."""
    if not is_torch_layer(type(module)):
        # Parametrizations too: spectral norm improves its vectors at each call.
        return not isinstance(module, nn.Sequential) and not is_read_only(type(module))
    if module.__dict__.get("max_norm") is not None:
        return True  # an embedding that scales down the rows that it reads
    return module.training and bool(module.__dict__.get("track_running_stats"))
