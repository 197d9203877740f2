"""Grad-CAM: show which part of an image speaks for a class, at several depths of a network.

    python examples/gradcam.py --output output/gradcam.png

A small convolutional network learns to name the two handwritten digits on a noisy canvas. One extractor then returns
the maps of all stages together with the logits, in one pass. The gradient of a logit with respect to a map weighs the
channels of the map (Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization,
2017). The digits have known places, so the run counts how often the maximum of the heat map lies on the right one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import featx

try:
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

CANVAS, DIGIT = 48, 16  # sides in pixels


def convolution(before: int, after: int, side: int) -> nn.Sequential:
    """Return a convolution with batch norm and ReLU that keeps height and width."""
    layer = nn.Conv2d(before, after, side, padding=side // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class Network(nn.Module):
    """Three stages of convolutions, of stride 2, 4 and 8, and a linear layer on the average of the last map."""

    def __init__(self, widths: tuple[int, int, int] = (16, 32, 64)) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(convolution(before, after, 3), nn.MaxPool2d(2), convolution(after, after, 1))
            for before, after in zip((1, *widths[:-1]), widths, strict=True)
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        for stage in self.stages:
            images = stage(images)
        return self.head(images.mean((2, 3)))


def read_digits(is_test: bool) -> tuple[Tensor, Tensor]:
    """Return images of digits, [n, DIGIT, DIGIT] in 0 to 1, and their classes; the last 297 are for tests."""
    data = load_digits()
    part = slice(1500, None) if is_test else slice(1500)
    images = torch.from_numpy(data.images[part]).float()[:, None] / 16
    return F.interpolate(images, size=DIGIT, mode="bilinear")[:, 0], torch.from_numpy(data.target[part])


def make_scenes(count: int, digits: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Paste two digits of different classes on each of `count` noisy canvases, side by side or one above the other.

    Returns:
        Images [count, 1, CANVAS, CANVAS], classes [count, 2], and the top left corners of the digits [count, 2, 2].
    """
    images, classes = digits
    scenes = 0.4 * torch.rand(count, 1, CANVAS, CANVAS, generator=generator)
    chosen = torch.randint(len(images), (count, 2), generator=generator)
    for pair in chosen:
        while classes[pair[0]] == classes[pair[1]]:
            pair[1] = torch.randint(len(images), (), generator=generator)
    # Along one axis each digit has a half of its own; along the other it may be anywhere.
    half = CANVAS // 2
    apart = torch.randint(half - DIGIT + 1, (count, 2), generator=generator) + torch.tensor([0, half])
    free = torch.randint(CANVAS - DIGIT + 1, (count, 2), generator=generator)
    is_upright = torch.rand(count, 1, generator=generator) < 0.5
    corners = torch.stack([torch.where(is_upright, apart, free), torch.where(is_upright, free, apart)], 2)
    for scene, pair, places in zip(scenes, chosen, corners.tolist(), strict=True):
        for image, (top, left) in zip(images[pair], places, strict=True):
            window = scene[0, top : top + DIGIT, left : left + DIGIT]
            window.copy_(torch.maximum(window, image))
    return scenes, classes[chosen], corners


def train(network: nn.Module, steps: int, generator: torch.Generator, batch: int = 32) -> None:
    """Train with binary cross-entropy on new scenes, and leave the network in eval mode."""
    digits = read_digits(is_test=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    network.train()
    for _ in range(steps):
        scenes, classes, _ = make_scenes(batch, digits, generator)
        wanted = torch.zeros(batch, 10).scatter_(1, classes, 1.0)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(network(scenes), wanted).backward()
        optimizer.step()
        schedule.step()
    network.eval()


def grad_cam(extractor: nn.Module, images: Tensor, classes: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return a heat map [n, height, width] for each map of the extractor, and the logits.

    Args:
        extractor: returns maps [n, channels, height, width] and "logits" [n, classes].
        images: what it takes.
        classes: of each image, the class whose logit is explained.
    """
    maps = extractor(images)
    logits = maps.pop("logits")
    gradients = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), list(maps.values()))
    heat = {
        key: (value * gradient.mean((2, 3), keepdim=True)).sum(1).relu().detach()
        for (key, value), gradient in zip(maps.items(), gradients, strict=True)
    }
    return heat, logits.detach()


def resized(heat: Tensor) -> Tensor:
    """Return heat maps in the size of the canvas, each with a maximum of 1."""
    heat = F.interpolate(heat[:, None], size=CANVAS, mode="bilinear")[:, 0]
    return heat / heat.amax((1, 2), keepdim=True).clamp_min(1e-9)


def on_digit(heat: Tensor, corners: Tensor) -> Tensor:
    """Say of each heat map [n, CANVAS, CANVAS] whether its maximum lies on the digit at this corner [n, 2]."""
    place = heat.flatten(1).argmax(1)
    inside = torch.stack([place // CANVAS, place % CANVAS], 1) - corners
    return ((inside >= 0) & (inside < DIGIT)).all(1)


def draw(scenes: Tensor, classes: Tensor, heat: list[dict[str, Tensor]], output: Path) -> None:
    """Draw a row for each scene and digit: the scene, and the heat maps at all depths over it."""
    rows, keys = len(scenes) * 2, list(heat[0])
    figure = Figure(figsize=(1.75 * (len(keys) + 1) + 0.9, 1.75 * rows + 0.6), layout="constrained")
    figure.suptitle("Grad-CAM: what speaks for each of the two digits")
    axes = figure.subplots(rows, len(keys) + 1)
    for row in range(rows):
        index, which = divmod(row, 2)
        axes[row][0].set_ylabel(f"logit of '{classes[index, which]}'", fontsize=12)
        for axis, key in zip(axes[row], [None, *keys], strict=True):
            axis.imshow(scenes[index, 0].numpy(), cmap="gray", vmin=0, vmax=1)
            if key is not None:
                values = heat[which][key][index].numpy()
                axis.imshow(values, cmap="inferno", alpha=0.9 * values**0.5, vmin=0, vmax=1)
                axis.plot(values.argmax() % CANVAS, values.argmax() // CANVAS, "+", color="cyan", ms=11, mew=1.8)
    for axis, title in zip(axes[0], ["scene", *keys], strict=True):
        axis.set_title(title, fontsize=11)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.colorbar(ScalarMappable(cmap="inferno"), ax=axes, label="heat, + at its maximum", shrink=0.5, aspect=30)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Train, explain the test scenes, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/gradcam.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=600, help="steps of training (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    network = Network()
    train(network, arguments.steps, generator)
    extractor = featx.create_feature_extractor(network, {"stages.*": "stage *", "output": "logits"})
    print(f"{extractor.feature_info}\n")
    scenes, classes, corners = make_scenes(400, read_digits(is_test=True), generator)
    explained = [grad_cam(extractor, scenes, classes[:, which]) for which in (0, 1)]
    heat = [{key: resized(value) for key, value in maps.items()} for maps, _ in explained]
    found = explained[0][1].topk(2).indices.sort(1).values
    print(f"both digits named rightly: {(found == classes.sort(1).values).all(1).float().mean():.1%} of 400 scenes")
    print(f"a digit covers {DIGIT**2 / CANVAS**2:.1%} of a scene; the maximum of the heat map lies on the right one:")
    for key in heat[0]:
        hits = torch.cat([on_digit(heat[which][key], corners[:, which]) for which in (0, 1)])
        print(f"  {key}: {hits.float().mean():.1%}")
    draw(scenes[:2], classes[:2], heat, arguments.output)
    print(f"The heat maps are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
