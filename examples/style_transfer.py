"""Paint one photo with the texture of another: a perceptual loss on the values of one extractor.

    python examples/style_transfer.py --content chelsea --style hubble_deep_field --output output/style_transfer.png

This is the method of Gatys et al., "Image Style Transfer Using Convolutional Neural Networks" (2016). The network is a
vgg11 with random weights, since nothing is downloaded: random filters have useful texture statistics too, see
Ustyuzhaninov et al., "Texture Synthesis Using Shallow Convolutional Networks with Random Filters" (2016). Trained
weights give a better picture. The photos come with scikit-image.

One extractor returns the content map and the Gram matrices of the style. It ends at the deepest of them. The content
is the value of a convolution, which the ReLU after it overwrites in the model; a forward hook would see that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featx
from featx import Feature

try:
    import skimage.data
    from matplotlib.figure import Figure
    from torchvision.models import vgg11
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

PHOTOS = (
    "astronaut",
    "chelsea",
    "coffee",
    "rocket",
    "hubble_deep_field",
    "retina",
    "immunohistochemistry",
    "grass",
    "gravel",
    "brick",
)
CONTENT = "features.3"  # a convolution
STYLE = ("features.1", "features.4", "features.7", "features.9")  # ReLUs
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def photo(name: str, size: int) -> Tensor:
    """Return the middle of a photo of scikit-image, of shape (1, 3, size, size), in 0 to 1."""
    image = torch.from_numpy(getattr(skimage.data, name)()).float() / 255
    image = image[..., None].expand(-1, -1, 3) if image.ndim == 2 else image
    image = image.permute(2, 0, 1)[None]
    side = min(image.shape[-2:])
    top, left = ((length - side) // 2 for length in image.shape[-2:])
    square = image[..., top : top + side, left : left + side]
    return F.interpolate(square, (size, size), mode="bilinear", antialias=True)


def gram(maps: Tensor) -> Tensor:
    """Return the covariances of all pairs of channels, of shape (batch, channels, channels).

    The means are taken away, which are large after random filters and would be most of the products.
    """
    channels = maps.flatten(2)
    channels = channels - channels.mean(-1, keepdim=True)
    return channels @ channels.transpose(1, 2) / channels.shape[-1]


def perceptual(network: nn.Module, images: Tensor) -> nn.Module:
    """Return an extractor of the content map and of the Gram matrices, which are computed in its graph."""
    wanted: dict[str, str | Feature] = {name: Feature(f"style of {name}", apply=gram) for name in STYLE}
    extractor = featx.create_feature_extractor(network, {**wanted, CONTENT: "content"}, example_inputs=images)
    return extractor.requires_grad_(False)


def losses(found: dict[str, Tensor], content: dict[str, Tensor], style: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the losses of content and style, each relative to the size of what it compares with."""

    def distance(key: str, target: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(found[key], target[key]) / target[key].square().mean()

    keys = [key for key in found if key != "content"]
    return distance("content", content), torch.stack([distance(key, style) for key in keys]).mean()


def transfer(
    extractor: nn.Module, content: Tensor, style: Tensor, steps: int, style_weight: float
) -> tuple[Tensor, list[tuple[float, float]]]:
    """Return the image that has the content of one and the style of another, and both losses at each step."""
    with torch.no_grad():
        content_values, style_values = extractor((content - MEAN) / STD), extractor((style - MEAN) / STD)
    image = content.clone().requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=0.003)
    history: list[tuple[float, float]] = []
    for step in range(steps):
        content_loss, style_loss = losses(extractor((image - MEAN) / STD), content_values, style_values)
        loss = content_loss + style_weight * style_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            image.clamp_(0, 1)
        history.append((content_loss.item(), style_loss.item()))
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:4d}: content {history[-1][0]:.4f}  style {history[-1][1]:.4f}")
    return image.detach(), history


def draw(path: Path, images: dict[str, Tensor], history: list[tuple[float, float]]) -> None:
    figure = Figure(figsize=(10.5, 2.8), layout="constrained")
    *frames, curve = figure.subplots(1, 4, width_ratios=(1, 1, 1, 1.3))
    for axes, (title, image) in zip(frames, images.items(), strict=True):
        axes.imshow(image[0].permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_title(title)
        axes.axis("off")
    content, style = zip(*history, strict=True)
    curve.plot(style, color="#d1495b", label="style: Gram matrices")
    curve.plot(range(1, len(content)), content[1:], color="#2e6f95", label="content: map")  # 0 at the first step
    curve.set(title="Losses", xlabel="step", ylabel="squared distance, relative", yscale="log")
    curve.spines[["top", "right"]].set_visible(False)
    curve.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Read two photos, optimize, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--content", choices=PHOTOS, default="chelsea", help="default: %(default)s")
    parser.add_argument("--style", choices=PHOTOS, default="immunohistochemistry", help="default: %(default)s")
    parser.add_argument("--size", type=int, default=128, help="of the images, in pixels (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="default: %(default)s")
    parser.add_argument("--style-weight", type=float, default=30.0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("output/style_transfer.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    content, style = (photo(name, arguments.size) for name in (arguments.content, arguments.style))
    extractor = perceptual(vgg11(weights=None).eval(), content)
    result, history = transfer(extractor, content, style, arguments.steps, arguments.style_weight)
    draw(arguments.output, {"Content": content, "Style": style, "Result": result}, history)
    print(f"The pictures and the losses are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
