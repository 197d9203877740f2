"""Quantize a model to 8 bits by graph edits: insert observers, calibrate them, write int8 layers, measure the error.

    python examples/quantize.py --model resnet18 --batches 4

Batch norms are fused into their convolutions first. Observers and int8 layers are torch's own (`torch.ao`). Weights are
random, from a fixed seed, unless `--pretrained` loads the real ones; the images are crops of one photo.
"""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.ao.nn.quantized as quantized
from torch import Tensor, nn
from torch.ao.quantization import HistogramObserver, PerChannelMinMaxObserver

import featx
from featx.passes import fuse_conv_bn

PHOTO = Path(__file__).parent / "images" / "chelsea.jpg"


def insert_observers(gm: featx.GraphModule) -> int:
    """Let `gm` watch what goes into and comes out of each convolution and linear layer; return how many observers."""
    watched = {value: None for node in _layers(gm) for value in (node.args[0], node)}
    for value in watched:
        # 7 of 8 bits, as torch's own configurations for x86: older CPUs add two products in 16 bits, which overflow.
        observed = HistogramObserver(dtype=torch.quint8, quant_min=0, quant_max=127)
        gm.add_submodule(_observer_of(value), observed)
        with gm.graph.inserting_after(value):
            observer = gm.graph.call_module(_observer_of(value), (value,))
        value.replace_all_uses_with(observer, delete_user_cb=lambda user, observer=observer: user is not observer)
    return len(watched)


def calibrate(gm: featx.GraphModule, batches: Iterable[Tensor]) -> None:
    """Let the observers see what the model makes of some data."""
    with torch.no_grad():
        for batch in batches:
            gm(batch)


def convert(gm: featx.GraphModule) -> int:
    """Replace observed layers by int8 ones, and observers by changes between float and 8 bits; return how many layers.

    Where one int8 layer reads another, alone or after a relu, nothing is changed in between.
    """
    for node in gm.graph.nodes:
        if node.op == "call_module" and isinstance(gm.get_submodule(node.target), HistogramObserver):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    layers = _layers(gm)
    for node in layers:
        source = node.args[0]
        gm.add_submodule(f"{_observer_of(source)}_in", _quantize(gm.get_submodule(_observer_of(source))))
        with gm.graph.inserting_before(node):
            node.args = (gm.graph.call_module(f"{_observer_of(source)}_in", (source,)),)
        _set(gm, node.target, _int8_layer(gm.get_submodule(node.target), gm.get_submodule(_observer_of(node))))
        with gm.graph.inserting_after(node):
            back = gm.graph.call_method("dequantize", (node,))
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
    for node in gm.graph.find_nodes(op="call_module"):
        if isinstance(gm.get_submodule(node.target), quantized.Quantize):
            _stay_in_8_bits(gm, node)
    gm.graph.eliminate_dead_code()
    gm.delete_all_unused_submodules()
    return len(layers)


def _stay_in_8_bits(gm: featx.GraphModule, quantize: featx.Node) -> None:
    # quantize(relu(dequantize(y))) is relu(y), and quantize(dequantize(y)) is y.
    source = quantize.args[0]
    is_relu = source.op == "call_module" and isinstance(gm.get_submodule(source.target), nn.ReLU)
    before = source.args[0] if is_relu else source
    if before.target != "dequantize":
        return
    value = before.args[0]
    if is_relu:
        with gm.graph.inserting_before(quantize):
            value = gm.graph.call_module(source.target, (value,))
    quantize.replace_all_uses_with(value)
    gm.graph.erase_node(quantize)


def _layers(gm: featx.GraphModule) -> list[featx.Node]:
    calls = gm.graph.find_nodes(op="call_module")
    return [node for node in calls if isinstance(gm.get_submodule(node.target), (nn.Conv2d, nn.Linear))]


def _observer_of(value: featx.Node) -> str:
    return f"observer_{value.name}"


def _set(gm: featx.GraphModule, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(gm.get_submodule(parent), name, module)


def _quantize(observer: Any) -> nn.Module:
    scale, zero_point = observer.calculate_qparams()
    return quantized.Quantize(float(scale), int(zero_point), torch.quint8)


def _int8_layer(layer: Any, observer: Any) -> nn.Module:
    per_channel = PerChannelMinMaxObserver(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
    per_channel(layer.weight.detach())
    scales, zero_points = per_channel.calculate_qparams()
    weight = torch.quantize_per_channel(layer.weight.detach(), scales, zero_points.int(), 0, torch.qint8)
    if isinstance(layer, nn.Linear):
        int8: Any = quantized.Linear(layer.in_features, layer.out_features)
    else:
        int8 = quantized.Conv2d(
            layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
            layer.groups, layer.bias is not None,
        )  # fmt: skip
    int8.set_weight_bias(weight, None if layer.bias is None else layer.bias.detach())
    scale, zero_point = observer.calculate_qparams()
    int8.scale, int8.zero_point = float(scale), int(zero_point)
    return int8


def quantize(model: nn.Module, batches: list[Tensor]) -> featx.GraphModule:
    """Return `model`, which is in eval mode, with int8 convolutions and linear layers. `model` stays as it is."""
    gm = featx.trace(model, batches[0])
    fuse_conv_bn(gm)
    insert_observers(gm)
    calibrate(gm, batches)
    convert(gm)
    return gm


def signal_to_noise(expected: Tensor, found: Tensor) -> float:
    """Return how much larger the expected values are than the error, in decibels."""
    return 20 * torch.log10(expected.norm() / (expected - found).norm()).item()


def size_of(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers in a file."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.getbuffer().nbytes


def crops(count: int, size: int) -> list[Tensor]:
    """Return batches of 8 crops of the photo, normalized, from a fixed seed."""
    from PIL import Image
    from torchvision.transforms import functional as transforms

    photo = transforms.pil_to_tensor(Image.open(PHOTO).convert("RGB")).float() / 255
    photo = (photo - photo.mean((1, 2), keepdim=True)) / photo.std((1, 2), keepdim=True)
    generator = torch.Generator().manual_seed(0)
    batches: list[Tensor] = []
    for _ in range(count):
        corners = torch.rand(8, 2, generator=generator) * (torch.tensor(photo.shape[1:]) - size)
        batches.append(torch.stack([photo[:, y : y + size, x : x + size] for y, x in corners.int().tolist()]))
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="resnet18", help="a classifier of torchvision without other spellings of relu"
    )
    parser.add_argument("--batches", type=int, default=4, help="of 8 crops each, for calibration")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--pretrained", action="store_true")
    options = parser.parse_args()
    try:
        from torchvision.models import get_model
    except ModuleNotFoundError:
        sys.exit('torchvision is not installed, and this example needs it: pip install "featx[examples]"')
    torch.manual_seed(0)
    model = get_model(options.model, weights="DEFAULT" if options.pretrained else None).eval()
    *batches, held_out = crops(options.batches + 1, options.size)
    with warnings.catch_warnings():  # torch says that it will move these layers into a package of their own
        warnings.simplefilter("ignore")
        int8 = quantize(model, batches)
        with torch.no_grad():
            expected, found = model(held_out), int8(held_out)
        layers = [module for module in int8.modules() if isinstance(module, (quantized.Conv2d, quantized.Linear))]
        print(f"layers in int8:   {len(layers)}")
        print(f"signal to noise:  {signal_to_noise(expected, found):.1f} dB on images that were not used to calibrate")
        print(f"same best class:  {(expected.argmax(1) == found.argmax(1)).float().mean():.0%}")
        print(f"size in a file:   {size_of(int8) / size_of(model):.2f} of the float model")


if __name__ == "__main__":
    main()
