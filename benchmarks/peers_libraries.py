"""Make one interface of featx and of the libraries that are compared with it, each used as its own README says."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn


class No(Exception):  # noqa: N818 - it is an answer
    """The library has no interface for this; the message says what it has."""


@dataclass
class Answer:
    """What an attempt gives, and the word for the cell: "yes", "partly: ..." or "by hand: ..."."""

    value: Any
    word: str = "yes"


@dataclass
class Extractor:
    """What a library returns to be called, and how it is called: the values in the order of the request."""

    thing: Any
    run: Callable[..., list[Tensor]]

    def __call__(self, *inputs: Any, **kwargs: Any) -> list[Tensor]:
        """Return the requested values."""
        return self.run(self.thing, *inputs, **kwargs)


class Library:
    """A library: `extract` is its own way; the other methods are attempts, by hand where it has no way of its own."""

    name = package = ""
    has_own_models_only = False
    # It has no object that is made once.
    is_function = False
    # Another interface of the library, for the rows where this one does less.
    other: Library | None = None

    def version(self) -> str | None:
        """Return the installed version, or None."""
        try:
            importlib.import_module(self.package.replace("-", "_"))
            return version(self.package)
        except (ImportError, PackageNotFoundError):
            return None

    def extract(self, model: nn.Module, names: Sequence[str], example: Any) -> Extractor:
        """Return something that gives the values of modules, by path."""
        raise NotImplementedError

    def flexible(self, model: nn.Module, names: Sequence[str], example: Any) -> Answer:
        """Return an extractor that goes on where another branch is taken, where that has to be asked for."""
        return Answer(self.extract(model, names, example))

    def scriptable(self, model: nn.Module, name: str, example: Any) -> nn.Module:
        """Return what is given to `torch.jit.script`."""
        return self.extract(model, [name], example).thing

    def cut(self, model: nn.Module, name: str, example: Tensor) -> Answer:
        """Return an extractor that ends at `name`, where it can."""
        return Answer(self.extract(model, [name], example))

    def overwritten(self, model: nn.Module, x: Tensor) -> Answer:
        """Return what bn1 gives, where the ReLU that overwrites it is needed too."""
        return Answer(self.extract(model, ["bn1", "layer1"], x)(x)[0])

    def operation(self, model: nn.Module, x: Tensor) -> Answer:
        """Return the sum inside layer1.0."""
        return Answer(self.extract(model, ["layer1.0.add"], x)(x)[0])

    def gradient(self, model: nn.Module, x: Tensor) -> Answer:
        """Return the gradient of the first logit with respect to what layer2 gives."""
        feature, logits = self.extract(model, ["layer2", "fc"], x)(x)
        return Answer(torch.autograd.grad(logits[0, 0], feature)[0])

    def block(self, model: Any, x: Tensor) -> Answer:
        """Return what block 1 of a vision transformer gives."""
        return Answer(self.extract(model, ["blocks.1"], x)(x)[0])

    def probabilities(self, model: Any, x: Tensor) -> Answer:
        """Return the attention probabilities of block 1, which are computed by a fused call."""
        q, k = self.extract(model, ["blocks.1.attn.q_norm", "blocks.1.attn.k_norm"], x)(x)
        return Answer(probabilities_of(q, k), "by hand: from q and k, where these are outputs of modules")

    def edit(self, model: nn.Module, x: Tensor, factor: Tensor) -> Answer:
        """Return the logits where layer1.0.conv2 gives `factor` times its value."""
        extractor = self.extract(model, ["fc"], x)
        handle = model.get_submodule("layer1.0.conv2").register_forward_hook(lambda _, inputs, value: value * factor)
        try:
            return Answer(extractor(x)[0], "by hand: a forward hook that returns a value")
        finally:
            handle.remove()

    def start(self, model: nn.Module, x: Tensor, value: Tensor) -> Answer:
        """Return the logits for a given output of layer2."""
        return Answer(self.extract(model, ["fc"], x)(value)[0])

    def listing(self, model: nn.Module, x: Tensor) -> dict[str, Any]:
        """Return what a listing says of layer2: its name, shape, stride, parameters, FLOPs."""
        raise No("no listing")

    def write(self, model: nn.Module, x: Tensor, folder: Path) -> Answer:
        """Write an extractor of layer2 as code, and return the name of its class."""
        thing = self.extract(model, ["layer2"], x).thing
        if not hasattr(thing, "to_folder"):
            raise No("no code")
        thing.to_folder(folder, "Written")
        return Answer("Written")

    def select(self, model: nn.Module, x: Tensor) -> Answer:
        """Return how many values `layer[34]` and the class BatchNorm2d stand for."""
        requests: list[Any] = ["layer[34]", nn.BatchNorm2d]
        return Answer(len(self.extract(model, requests, x)(x)))

    def pooled(self, model: nn.Module, x: Tensor) -> Answer:
        """Return layer4 pooled, and layer3 with the channels last, as the extractor itself gives them."""
        raise No("on what it returns")

    def pyramid(self, x: Tensor) -> Answer:
        """Return maps of a resnet18, and their strides, without naming a layer."""
        raise No("layers are named")


def probabilities_of(q: Tensor, k: Tensor) -> Tensor:
    """Return attention probabilities by hand."""
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)


class Featx(Library):
    """This library."""

    name = package = "featx"

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Make an extractor."""
        featx = importlib.import_module("featx")
        extractor = featx.create_feature_extractor(model, list(names), example_inputs=example)
        return Extractor(extractor, lambda thing, *args, **kwargs: list(thing(*args, **kwargs).values()))

    def flexible(self, model: nn.Module, names: Sequence[str], example: Any) -> Answer:
        """Ask for an adaptive one."""
        featx = importlib.import_module("featx")
        thing = featx.create_feature_extractor(model, list(names), example_inputs=example, adaptive=True)
        return Answer(Extractor(thing, lambda thing, x: list(thing(x).values())), "yes: adaptive=True; else refused")

    def probabilities(self, model: Any, x: Tensor) -> Answer:
        """Ask for the node beside the fused call."""
        return Answer(self.extract(model, ["blocks.1.attn.probabilities"], x)(x)[0])

    def edit(self, model: nn.Module, x: Tensor, factor: Tensor) -> Answer:
        """Give `edits`."""
        featx = importlib.import_module("featx")
        edits = {"layer1.0.conv2": lambda value: value * factor}
        return Answer(featx.create_feature_extractor(model, ["fc"], edits=edits, example_inputs=x)(x)["fc"])

    def start(self, model: nn.Module, x: Tensor, value: Tensor) -> Answer:
        """Give `inputs`."""
        featx = importlib.import_module("featx")
        return Answer(featx.create_feature_extractor(model, ["fc"], inputs=["layer2"], example_inputs=x)(value)["fc"])

    def listing(self, model: nn.Module, x: Tensor) -> dict[str, Any]:
        """Ask `nodes`."""
        row = importlib.import_module("featx").nodes(model, x)["layer2"]
        return {"shape": row.shape, "stride": row.stride, "parameters": row.parameters, "FLOPs": row.flops}

    def pooled(self, model: nn.Module, x: Tensor) -> Answer:
        """Request features."""
        featx = importlib.import_module("featx")
        request = {"layer4": featx.Feature(pool="avg"), "layer3": featx.Feature(layout="NHWC")}
        return Answer(list(featx.create_feature_extractor(model, request, example_inputs=x)(x).values()))

    def pyramid(self, x: Tensor) -> Answer:
        """Make a backbone of torchvision's model."""
        model = torchvision.models.resnet18(weights=None).eval()
        backbone = importlib.import_module("featx").create_backbone(model, strides=[4, 8, 16, 32], example_inputs=x)
        return Answer((backbone.strides, list(backbone(x).values())))


class Torchvision(Library):
    """torchvision.models.feature_extraction."""

    name = package = "torchvision"

    def extract(self, model: nn.Module, names: Sequence[Any], example: Any) -> Extractor:
        """Make an extractor."""
        from torchvision.models.feature_extraction import create_feature_extractor

        extractor = create_feature_extractor(model, list(names))
        return Extractor(extractor, lambda thing, *args, **kwargs: list(thing(*args, **kwargs).values()))

    def listing(self, model: nn.Module, x: Tensor) -> dict[str, Any]:
        """List the names of nodes."""
        names = torchvision.models.feature_extraction.get_graph_node_names(model)[1]
        return {"name": "layer2" if "layer2.1.relu_1" in names else None}


class Timm(Library):
    """timm: `features_only`, `forward_intermediates` and `AttentionExtract`, for its own models."""

    name = package = "timm"
    has_own_models_only = True

    def extract(self, model: Any, names: Sequence[Any], example: Any) -> Extractor:
        """Build timm's model with `features_only`, with the weights of the given one; or ask for intermediates."""
        if isinstance(model, timm.models.VisionTransformer):
            if len(names) != 1 or not names[0].startswith("blocks.") or names[0].count(".") > 1:
                raise No("blocks only")
            return Extractor(model, _blocks_of(int(names[0].removeprefix("blocks."))))
        if not isinstance(model, torchvision.models.ResNet):
            raise No("its own models only")
        stages = [f"layer{index}" for index in range(1, 5)]
        if any(name not in stages for name in names):
            raise No("stages only")
        built = "resnet50" if isinstance(model.layer1[0], torchvision.models.resnet.Bottleneck) else "resnet18"
        indices = tuple(stages.index(name) + 1 for name in names)
        thing = timm.create_model(built, features_only=True, out_indices=indices)
        thing.load_state_dict(model.state_dict(), strict=False)
        return Extractor(thing.train(model.training), lambda thing, x: thing(x))

    def gradient(self, model: nn.Module, x: Tensor) -> Answer:
        """Call `forward_intermediates` and the head."""
        own = timm.create_model("resnet18").eval()
        own.load_state_dict(model.state_dict())
        final, (feature,) = own.forward_intermediates(x, indices=[2])
        value = torch.autograd.grad(own.forward_head(final)[0, 0], feature)[0]
        return Answer(value, "yes: forward_intermediates and forward_head")

    def block(self, model: Any, x: Tensor) -> Answer:
        """Call `forward_intermediates`."""
        return Answer(self.extract(model, ["blocks.1"], x)(x)[0], "yes: forward_intermediates")

    def probabilities(self, model: Any, x: Tensor) -> Answer:
        """Use `AttentionExtract`, which finds nothing in fused attention; then without that."""
        from timm.utils import AttentionExtract

        try:
            return Answer(list(AttentionExtract(model)(x).values())[1])
        except RuntimeError:
            for block in model.blocks:
                block.attn.fused_attn = False
            return Answer(list(AttentionExtract(model)(x).values())[1], "partly: once the attention is not fused")

    def edit(self, model: nn.Module, x: Tensor, factor: Tensor) -> Answer:
        """Use a hook on timm's model."""
        own = timm.create_model("resnet18").eval()
        own.load_state_dict(model.state_dict())
        own.get_submodule("layer1.0.conv2").register_forward_hook(lambda _, inputs, value: value * factor)
        return Answer(own(x), "by hand: a forward hook that returns a value")

    def start(self, model: nn.Module, x: Tensor, value: Tensor) -> Answer:
        """Look for a way in."""
        own: Any = timm.create_model("resnet18").eval()
        own.load_state_dict(model.state_dict())
        own.forward_head(own.layer4(own.layer3(value)))
        raise No("forward_head alone")

    def listing(self, model: nn.Module, x: Tensor) -> dict[str, Any]:
        """Read `feature_info`: of stages."""
        info = timm.create_model("resnet18", features_only=True).feature_info
        place = info.module_name().index("layer2")
        return {"channels": info.channels()[place], "stride": info.reduction()[place]}

    def pooled(self, model: nn.Module, x: Tensor) -> Answer:
        """Ask for tokens as maps; there is no interface for pooling."""
        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
        for layout, shape in (("NCHW", (1, 192, 2, 2)), ("NLC", (1, 4, 192))):
            found = vit.forward_intermediates(torch.rand(1, 3, 32, 32), output_fmt=layout, intermediates_only=True)
            assert found[0].shape == shape
        return Answer(None, "partly: NCHW or NLC, no pooling")

    def select(self, model: nn.Module, x: Tensor) -> Answer:
        """Try the wildcards of `AttentionExtract`."""
        from timm.utils import AttentionExtract

        vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
        assert len(AttentionExtract(vit, names=["*.norm?"], method="hook")(torch.rand(1, 3, 32, 32))) == 4
        return Answer(None, "partly: wildcards in AttentionExtract")

    def pyramid(self, x: Tensor) -> Answer:
        """Build with `features_only`."""
        thing = timm.create_model("resnet18", features_only=True, out_indices=(1, 2, 3, 4)).eval()
        return Answer((thing.feature_info.reduction(), thing(x)), "yes: its own models")


def _blocks_of(index: int) -> Callable[..., list[Tensor]]:
    def run(model: Any, x: Tensor) -> list[Tensor]:
        found = model.forward_intermediates(
            x, indices=[index], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True, stop_early=True
        )
        return [torch.cat([prefix, tokens], dim=1) for tokens, prefix in found]

    return run
