"""Turn a photo into features of three models: a table of names and shapes, and a picture of the feature maps.

    python examples/extract_features.py --image photo.jpg --output output/features.png

Weights are random, from a fixed seed, unless `--pretrained` loads the real ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import featx

try:
    import timm
    import timm.data
    from matplotlib.figure import Figure
    from PIL import Image, ImageOps
    from torchvision.models import ResNet50_Weights, resnet50
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

PHOTO = Path(__file__).parent / "images" / "chelsea.jpg"


class ExampleError(Exception):
    """What the user can put right: an image, an output path, or weights that cannot be loaded."""


@dataclass
class Subject:
    """A model, what to ask it for, and how it wants its images."""

    name: str
    model: nn.Module
    return_nodes: dict[str, str]  # node name -> key
    preprocess: Callable[[Image.Image], Tensor]
    mean: list[float]
    std: list[float]


@dataclass
class Feature:
    """A value, the node that made it, the same as a map of [channels, height, width], and its stride in pixels."""

    key: str
    node: str
    value: Tensor
    map: Tensor
    stride: int


@dataclass
class Result:
    """What a model made of the photo; `seen` is its input in colours again, [3, height, width] in 0 to 1."""

    name: str
    seen: Tensor
    features: list[Feature]


def main() -> None:
    """Extract, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, default=PHOTO, help="photo to look at (default: the shipped one)")
    parser.add_argument("--output", type=Path, default=Path("output/features.png"), help="default: %(default)s")
    parser.add_argument("--pretrained", action="store_true", help="load real weights; needs the network")
    arguments = parser.parse_args()
    weights = "pretrained weights" if arguments.pretrained else "random weights"
    try:
        photo = read_photo(arguments.image)
        results = [extract(subject, photo) for subject in subjects(arguments.pretrained)]
        print(f"{arguments.image}, {photo.width} x {photo.height} pixels; {weights}\n")
        print_table(results)
        draw(results, f"First principal component of the features, {weights}", arguments.output)
    except ExampleError as error:
        sys.exit(f"error: {error}")
    print(f"\nThe feature maps are drawn in {arguments.output}")


def read_photo(path: Path) -> Image.Image:
    """Read an image file as RGB, or raise ExampleError."""
    try:
        return ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    except FileNotFoundError:
        raise ExampleError(f"no file '{path}'; give the path of a photo with --image") from None
    except OSError as error:
        raise ExampleError(f"cannot read '{path}' as an image ({error}); give a JPEG or PNG file") from error


def subjects(pretrained: bool) -> Iterator[Subject]:
    """Build the models one after the other, each with three of its stages as the wish."""
    weights = ResNet50_Weights.DEFAULT
    preset = weights.transforms()
    model = build(lambda: resnet50(weights=weights if pretrained else None))
    stages = {"layer2": "C3", "layer3": "C4", "layer4": "C5"}
    yield Subject("torchvision resnet50", model, stages, preset, preset.mean, preset.std)

    blocks = {"blocks.3": "block 4", "blocks.7": "block 8", "blocks.11": "block 12"}
    stages = {"stages.1": "C3", "stages.2": "C4", "stages.3": "C5"}
    for name, wanted in (("vit_small_patch16_224", blocks), ("convnext_tiny", stages)):
        model = build(lambda name=name: timm.create_model(name, pretrained=pretrained))
        config = timm.data.resolve_model_data_config(model)
        transform: Any = timm.data.create_transform(**config)
        yield Subject(f"timm {name}", model, wanted, transform, config["mean"], config["std"])


def build(create: Callable[[], nn.Module]) -> nn.Module:
    """Create a model in eval mode, with the same random weights each time, or raise ExampleError."""
    torch.manual_seed(0)
    try:
        return create().eval()
    except (OSError, RuntimeError) as error:
        advice = "they come over the network; drop --pretrained to use random weights"
        raise ExampleError(f"the pretrained weights did not load ({error}); {advice}") from error


def extract(subject: Subject, photo: Image.Image) -> Result:
    """Run the wanted part of a model on the photo."""
    image = subject.preprocess(photo)
    extractor = featx.create_feature_extractor(subject.model, subject.return_nodes)
    with torch.inference_mode():
        values = extractor(image[None])
    _, names = featx.get_graph_node_names(subject.model)
    prefix_tokens: Any = getattr(subject.model, "num_prefix_tokens", 0)
    features: list[Feature] = []
    for path, key in subject.return_nodes.items():
        node = [name for name in names if name.startswith(f"{path}.")][-1]
        feature_map = as_map(values[key], image, prefix_tokens)
        features.append(Feature(key, node, values[key], feature_map, image.shape[-1] // feature_map.shape[-1]))
    mean, std = torch.tensor(subject.mean), torch.tensor(subject.std)
    return Result(subject.name, (image * std.view(3, 1, 1) + mean.view(3, 1, 1)).clamp(0, 1), features)


def as_map(feature: Tensor, image: Tensor, prefix_tokens: int) -> Tensor:
    """Take the batch dimension off; tokens go back to their grid, without the class token in front of them."""
    if feature.dim() == 4:
        return feature[0]
    patches = feature[0, prefix_tokens:]
    height = round((len(patches) * image.shape[-2] / image.shape[-1]) ** 0.5)
    return patches.T.unflatten(1, (height, -1))


def print_table(results: list[Result]) -> None:
    """Print a row for each feature."""
    rows = [("model", "key", "node", "shape", "stride")]
    for result in results:
        rows += [(result.name, f.key, f.node, str(tuple(f.value.shape)), str(f.stride)) for f in result.features]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in (rows[0], tuple("-" * width for width in widths), *rows[1:]):
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def draw(results: list[Result], title: str, path: Path) -> None:
    """Write a picture with a row for each model: what it saw, then its features; or raise ExampleError."""
    columns = 1 + max(len(result.features) for result in results)
    figure = Figure(figsize=(2.6 * columns, 2.8 * len(results) + 0.4), layout="constrained")
    figure.suptitle(title)
    for axes, result in zip(figure.subplots(len(results), columns, squeeze=False), results, strict=True):
        axes[0].set_title(result.name, fontsize=9)
        axes[0].imshow(result.seen.permute(1, 2, 0))
        for axis, feature in zip(axes[1:], result.features, strict=True):
            axis.set_title(f"{feature.key}: " + " x ".join(map(str, feature.map.shape)), fontsize=9)
            axis.imshow(principal_component(feature.map))
        for axis in axes:
            axis.set_axis_off()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ExampleError(f"cannot write '{path}' ({error}); give another path with --output") from error


def principal_component(feature: Tensor) -> Tensor:
    """Return [height, width] of [channels, height, width]: the first principal component of the channels."""
    pixels = feature.flatten(1).T.double()
    directions = torch.linalg.svd(pixels - pixels.mean(0), full_matrices=False).Vh
    sign = directions[0].sum().sign()  # that of a component is arbitrary; bright is where the sum of channels is high
    return (pixels @ directions[0] * sign).view(feature.shape[1:])


if __name__ == "__main__":
    main()
