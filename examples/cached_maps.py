"""Train a head on feature maps that were computed once, and on maps that are computed in each epoch, and compare.

    python examples/cached_maps.py --output output/cached_maps.png

A frozen network gives the same maps in each epoch. `featx.extract` writes them once, as Arrow files that are mapped
into memory; a convolutional head is then trained on them. With the same seed both heads see the same batches in the
same order, so their accuracies agree, and the head on cached maps needs a part of the time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featx

try:
    import torchvision
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples,extract]"')

NODES = {"layer2": "map"}
SIDE = 64


class Digits(torch.utils.data.Dataset[Tensor]):
    """Scikit-learn's digits as images of 64 x 64 pixels; the labels are beside."""

    def __init__(self, count: int) -> None:
        bunch = load_digits()
        order = torch.randperm(len(bunch.target))[:count]
        small = torch.from_numpy(bunch.images)[order, None].float() / 8 - 1
        self.images = F.interpolate(small, size=SIDE, mode="bilinear").expand(-1, 3, -1, -1)
        self.labels = torch.from_numpy(bunch.target)[order].long()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


def as_it_is(image: Tensor) -> Tensor:
    """Return an image that is a tensor already."""
    return image


def make_head() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(128, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)
    )


def train(
    maps_of: Callable[[Tensor], Tensor], labels: Tensor, train_count: int, epochs: int, seed: int
) -> tuple[list[float], list[float]]:
    """Train a head, and return the seconds since the start and the accuracy on the other samples for each epoch."""
    torch.manual_seed(seed)
    head = make_head()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    seconds, accuracies = list[float](), list[float]()
    spent = 0.0
    for _ in range(epochs):
        start = time.perf_counter()
        for numbers in torch.randperm(train_count).split(32):
            loss = F.cross_entropy(head(maps_of(numbers)), labels[numbers])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        spent += time.perf_counter() - start
        seconds.append(spent)
        with torch.no_grad():
            tests = torch.arange(train_count, len(labels)).split(64)
            right = sum(int((head(maps_of(each)).argmax(1) == labels[each]).sum()) for each in tests)
        accuracies.append(right / (len(labels) - train_count))
    return seconds, accuracies


def draw(path: Path, curves: dict[str, tuple[list[float], list[float]]], caching: float) -> None:
    """Draw the accuracies over the seconds of training."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for color, (name, (seconds, accuracies)) in zip(("#2e6f95", "#d1495b"), curves.items(), strict=True):
        axes.plot(seconds, [100 * each for each in accuracies], "o-", ms=3, color=color, label=name)
    axes.axvspan(0, caching, color="#2e6f95", alpha=0.12, label="to compute the maps once")
    axes.set(title="A head on maps of a frozen network", xlabel="seconds", ylabel="test accuracy (%)", ylim=(0, 101))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Compute maps once, train both heads, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/cached_maps.png"), help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=600, help="a quarter are test samples (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    digits = Digits(arguments.samples)
    model = torchvision.models.resnet18(weights=None).eval()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        table = featx.extract(
            model, NODES, digits, Path(folder) / "maps", transform=as_it_is, batch_size=32, workers=0, progress=False
        )
        maps = table.tensor("map")
        caching = time.perf_counter() - start
        print(f"{table}, computed in {caching:.1f} s")
        extractor = featx.create_feature_extractor(model, NODES).requires_grad_(False)

        def computed(numbers: Tensor) -> Tensor:
            return extractor(digits.images[numbers])["map"]

        count = 3 * arguments.samples // 4
        seconds, accuracies = train(lambda numbers: maps[numbers], digits.labels, count, arguments.epochs, 1)
        again = train(computed, digits.labels, count, arguments.epochs, 1)
    curves = {"cached maps": ([caching + each for each in seconds], accuracies), "maps of each epoch anew": again}
    for name, (times, found) in curves.items():
        print(f"{name}: {100 * found[-1]:.1f}% after {times[-1]:.1f} s")
    draw(arguments.output, curves, caching)
    print(f"The accuracies are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
