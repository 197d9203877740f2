"""What a plan depends on: the hardware, the version of torch, and the extractor."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

import torch
from torch import nn

from featx.features.adaptive import AdaptiveExtractor
from featx.fingerprint import fingerprint_of_code, fingerprint_of_modules
from featx.module import GraphModule
from featx.optimization.openvino_runner import check_available
from featx.optimization.recipe import OPENVINO, Recipe


def hardware_of(module: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Describe where a module runs by a recipe: the processor or GPU, the threads, torch, and OpenVINO if it is used.

    Raises:
        MissingExtraError: OpenVINO is used, and not installed.
    """
    device = device_of(module)
    found = {"device": device.type, "torch": ".".join(torch.__version__.split("+")[0].split(".")[:2])}
    if device.type == "cuda":
        return {**found, "name": torch.cuda.get_device_name(device)}
    if recipe.compile == OPENVINO:
        check_available()
        found["openvino"] = ".".join(version("openvino").split(".")[:2])
    capability = torch.backends.cpu.get_cpu_capability()
    return {**found, "name": _processor(), "instructions": capability, "threads": str(torch.get_num_threads())}


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first tensor of a module; the CPU where it has none."""
    return next((tensor.device for tensor in tensors_of(module)), torch.device("cpu"))


def digest_of(extractor: nn.Module) -> str:
    """Return a hash of what an extractor computes, without the values of its weights.

    That is its code, the forms of its weights, and its modules and functions by their source and their attributes.
    """
    first = extractor.extractors[0] if isinstance(extractor, AdaptiveExtractor) else extractor
    if isinstance(first, GraphModule):
        text = f"{first.code} {fingerprint_of_code(first, first.graph)}"
    else:
        text = fingerprint_of_modules(first)
    if isinstance(extractor, AdaptiveExtractor):
        text += fingerprint_of_modules(extractor.traced_model)
    tensors = [*extractor.named_parameters(), *extractor.named_buffers()]
    described = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in sorted(tensors, key=itemgetter(0))]
    return hashlib.sha256("\n".join([text, *described]).encode()).hexdigest()


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
