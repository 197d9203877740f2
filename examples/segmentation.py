"""Segment digits on photos: the maps of torchvision's mobilenet_v3_small in the decoder of a U-Net.

    python examples/segmentation.py --output output/segmentation.png

`featx.create_backbone` finds the maps of a classifier by their strides; the decoder is that of
segmentation_models_pytorch, which takes a list of maps, stride 1 (the image itself) first. `backbone.channels` says how
many channels they have. The images are handwritten digits of scikit-learn, pasted over photos of scikit-image. The
model is shown a few of them until it has them by heart.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featx

try:
    import skimage.data
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoder
    from sklearn.datasets import load_digits
    from torchvision.models import mobilenet_v3_small
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

STRIDES = (1, 2, 4, 8, 16, 32)
SIZE, DIGIT = 96, 40  # of images and digits, in pixels
DIGITS = (0, 1, 2, 3)
CLASSES = ["background", *map(str, DIGITS)]
COLORS = ["#f2f2f2", "#2e6f95", "#d1495b", "#edae49", "#3c896d"]
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket")


class Segmenter(nn.Module):
    """A backbone, the decoder of a U-Net, and a classifier of each pixel."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        super().__init__()
        self.backbone = featx.create_backbone(model, STRIDES, as_list=True, example_inputs=example)
        widths = (64, 48, 32, 24, 16)
        self.decoder = UnetDecoder(self.backbone.channels, widths, n_blocks=len(widths))
        self.classifier = nn.Conv2d(widths[-1], len(CLASSES), 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, of shape (batch, classes, height, width)."""
        return self.classifier(self.decoder(self.backbone(images)))


def compose(count: int) -> tuple[Tensor, Tensor]:
    """Return images, of shape (count, 3, SIZE, SIZE) in 0 to 1, and the class of each pixel: two digits in each."""
    bunch = load_digits()
    pictures, names = torch.from_numpy(bunch.images).float() / 16, torch.from_numpy(bunch.target)
    images, truth = torch.empty(count, 3, SIZE, SIZE), torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    for index in range(count):
        photo = torch.from_numpy(getattr(skimage.data, PHOTOS[index % len(PHOTOS)])()).permute(2, 0, 1) / 255
        scaled = F.interpolate(photo[None], (SIZE, SIZE), mode="bilinear", antialias=True)[0]
        images[index] = scaled
        for half, label in enumerate(torch.randperm(len(DIGITS))[:2].tolist()):
            choices = (names == DIGITS[label]).nonzero()[:, 0]
            picture = pictures[choices[torch.randint(len(choices), ())]]
            mask = F.interpolate(picture[None, None], (DIGIT, DIGIT), mode="bicubic")[0, 0] > 0.45
            top = int(torch.randint(2, SIZE - DIGIT - 1, ()))
            left = half * SIZE // 2 + int(torch.randint(1, SIZE // 2 - DIGIT, ()))
            window = images[index, :, top : top + DIGIT, left : left + DIGIT]
            window[:, mask] = torch.rand(3, 1) * 0.8 + 0.1
            truth[index, top : top + DIGIT, left : left + DIGIT][mask] = label + 1
    return images, truth


def train(model: nn.Module, images: Tensor, truth: Tensor, steps: int, batch: int = 6) -> list[float]:
    """Train a model on a few images, and return the loss at each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    weight = torch.tensor([1.0] + [3.0] * len(DIGITS))  # most pixels are background
    history: list[float] = []
    for step in range(steps):
        chosen = torch.randperm(len(images))[:batch]
        loss = F.cross_entropy(model.train()(images[chosen]), truth[chosen], weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        history.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}: loss {loss.item():.3f}")
    return history


def recompute_statistics(model: nn.Module, images: Tensor, passes: int = 5) -> None:
    """Let batch norm take its statistics from the trained weights: few steps are too few for running averages."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all that follow
    with torch.no_grad():
        for _ in range(passes):
            model.train()(images)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum


def mean_iou(found: Tensor, truth: Tensor) -> float:
    """Return the mean over the classes of intersection over union."""
    both = [((found == label) & (truth == label)).sum() for label in range(len(CLASSES))]
    either = [((found == label) | (truth == label)).sum() for label in range(len(CLASSES))]
    return torch.stack([a / b for a, b in zip(both, either, strict=True) if b > 0]).mean().item()


def draw(path: Path, images: Tensor, truth: Tensor, found: Tensor, score: float) -> None:
    count = min(4, len(images))
    figure = Figure(figsize=(1.9 * count, 6.0), layout="constrained")
    figure.suptitle(f"Digits on photos, mean IoU {score:.2f}")
    grid = figure.subplots(3, count, squeeze=False)
    colors = ListedColormap(COLORS)
    for column in range(count):
        grid[0, column].imshow(images[column].permute(1, 2, 0).numpy(), interpolation="nearest")
        for row, labels in ((1, truth), (2, found)):
            last = grid[row, column].imshow(
                labels[column].numpy(), cmap=colors, vmin=-0.5, vmax=len(CLASSES) - 0.5, interpolation="nearest"
            )
    for axes, name in zip(grid[:, 0], ("image", "truth", "prediction"), strict=True):
        axes.set_ylabel(name)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    bar = figure.colorbar(last, ax=grid, location="bottom", shrink=0.6, aspect=30, pad=0.02)
    bar.set_ticks(range(len(CLASSES)), labels=CLASSES)
    bar.set_label("class of the pixel")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Compose images, train, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/segmentation.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=90, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    images, truth = compose(arguments.images)
    model = Segmenter(mobilenet_v3_small(weights=None), images)
    print(model.backbone.feature_info, "\n")
    train(model, images, truth, arguments.steps)
    recompute_statistics(model, images)
    with torch.no_grad():
        found = model.eval()(images).argmax(1)
    score = mean_iou(found, truth)
    print(f"\nmean IoU on these images: {score:.3f}")
    draw(arguments.output, images, truth, found, score)
    print(f"Images, truth and predictions are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
