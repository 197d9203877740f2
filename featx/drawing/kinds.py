"""Sort operations into the families that pictures give colours to, by what they are called."""

from __future__ import annotations

from torch import nn

# What a family is called in legends, in the order in which they are listed there.
KINDS = {
    "io": "input, output",
    "layer": "layer with weights",
    "norm": "normalization",
    "activation": "activation",
    "attention": "attention",
    "pool": "pooling",
    "math": "arithmetic",
    "shape": "change of shape",
    "dropout": "dropout, identity",
    "module": "other module",
    "constant": "parameter, buffer",
    "number": "number, size",
    "check": "check",
}
_ACTIVATIONS = frozenset(
    "relu relu6 gelu silu swish mish elu celu selu glu prelu rrelu leaky_relu sigmoid tanh softmax log_softmax softmin "
    "softplus softsign softshrink tanhshrink hardshrink hardsigmoid hardswish hardtanh hard_swish logsigmoid threshold "
    "clamp".split()
)
_SHAPES = frozenset(
    "view reshape permute transpose flatten unflatten cat concat concatenate stack hstack vstack split chunk unbind "
    "unsqueeze squeeze expand expand_as repeat repeat_interleave contiguous getitem setitem roll pad swapaxes movedim "
    "narrow select index_select gather scatter t flip tile unfold fold view_as reshape_as rearrange pixel_shuffle "
    "pixel_unshuffle channel_shuffle getattr to float type_as type half int long bool clone detach interpolate size "
    "tensor_split split_with_sizes swapdims adjoint broadcast_to rot90 meshgrid".split()
)
# Attributes and methods of tensors that give numbers.
NUMBERS_OF_TENSORS = frozenset("shape size dim ndim ndimension numel nelement dtype device is_cuda itemsize".split())
# Looked for in names, in this order: `MultiheadAttention`, `scaled_dot_product_attention`, `DropPath`.
_PARTS = (
    ("attention", "attention"), ("norm", "norm"), ("pool", "pool"), ("dropout", "dropout"), ("droppath", "dropout"),
    ("drop_path", "dropout"), ("identity", "dropout"), ("conv", "layer"), ("linear", "layer"), ("embedding", "layer"),
    ("lstm", "layer"), ("gru", "layer"), ("rnn", "layer"),
)  # fmt: skip


def kind_of_call(operation: str) -> str:
    """Return the family of a function or method by its short name."""
    name = operation.strip("_").lower()
    if name in _SHAPES:
        return "shape"
    if name in _ACTIVATIONS:
        return "activation"
    return next((kind for part, kind in _PARTS if part in name), "math")


def kind_of_module(module: object) -> str:
    """Return the family of a module that is one node."""
    if not isinstance(module, nn.Module):
        return "module"
    name = type(module).__name__.lower()
    if type(module).__module__ == "torch.nn.modules.activation" and "attention" not in name:
        return "activation"
    if name in _SHAPES or type(module).__module__ in ("torch.nn.modules.padding", "torch.nn.modules.upsampling"):
        return "shape"
    # Modules with other modules in them are called by what they are for: a whole `SelfAttention`, an own `ConvBlock`.
    kind = next((kind for part, kind in _PARTS if part in name), None)
    return kind if kind and (kind == "attention" or not module._modules) else "module"
