"""Linear probes: how much of the class a linear classifier can read at every depth of a network.

    python examples/probes.py --output output/probes.png

A residual network learns to name handwritten digits at random places of a canvas. One pattern, `blocks.*`, asks for all
of its blocks, and `Feature(pool="avg")` averages each map inside of the extractor, so that no map is kept. A logistic
regression is fitted to each feature (Alain and Bengio, Understanding Intermediate Layers Using Linear Classifier
Probes, 2016), for the trained network and for the same network with its first, random weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import featx
from featx import Feature

try:
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

CANVAS = 14  # side in pixels; a digit has 8


class Block(nn.Module):
    """A convolution with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, value: Tensor) -> Tensor:
        return value + F.relu(self.norm(self.conv(value)))


class Network(nn.Module):
    """A convolution, residual blocks, and a linear layer on the average of the last map."""

    def __init__(self, width: int = 12, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def make_images(generator: torch.Generator, copies: int = 2) -> tuple[Tensor, Tensor]:
    """Return `copies` of each digit at random places, [n, 1, CANVAS, CANVAS] in 0 to 1, and the classes.

    The order is that of the data set, with the copies of all digits one after the other.
    """
    data = load_digits()
    digits = torch.from_numpy(data.images).float().repeat(copies, 1, 1) / 16
    images = torch.zeros(len(digits), 1, CANVAS, CANVAS)
    corners = torch.randint(CANVAS - 7, (len(digits), 2), generator=generator).tolist()
    for image, digit, (top, left) in zip(images, digits, corners, strict=True):
        image[0, top : top + 8, left : left + 8] = digit
    return images, torch.from_numpy(data.target).repeat(copies)


def train(network: nn.Module, images: Tensor, classes: Tensor, steps: int, generator: torch.Generator) -> None:
    """Train with cross-entropy on random batches, and leave the network in eval mode."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    network.train()
    for _ in range(steps):
        batch = torch.randint(len(images), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(network(images[batch]), classes[batch]).backward()
        optimizer.step()
        schedule.step()
    network.eval()


def create_probed(network: nn.Module) -> nn.Module:
    """Return an extractor of the average of each map, [n, channels], from the first to the last."""
    return featx.create_feature_extractor(network, {"stem": Feature(pool="avg"), "blocks.*": Feature(pool="avg")})


def probe(features: Tensor, classes: Tensor, is_test: Tensor) -> float:
    """Fit a linear classifier to features [n, channels] of what is no test, and return its accuracy on the tests."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000))
    classifier.fit(features[~is_test].numpy(), classes[~is_test].numpy())
    return float(classifier.score(features[is_test].numpy(), classes[is_test].numpy()))


def probe_all(network: nn.Module, images: Tensor, classes: Tensor, is_test: Tensor) -> dict[str, float]:
    """Return the accuracy of a probe at each depth, by the name of the node."""
    with torch.no_grad():
        features = create_probed(network)(images)
    return {name: probe(value, classes, is_test) for name, value in features.items()}


def draw(trained: dict[str, float], untrained: dict[str, float], network_accuracy: float, output: Path) -> None:
    """Draw accuracy over depth."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    axis = figure.subplots()
    places = range(len(trained))
    axis.fill_between(places, list(untrained.values()), list(trained.values()), color="#2a6fbb", alpha=0.10, lw=0)
    axis.plot(places, list(trained.values()), "o-", color="#2a6fbb", lw=2)
    axis.plot(places, list(untrained.values()), "s-", color="#c8553d", lw=2)
    axis.axhline(network_accuracy, color="#2a6fbb", ls=":", lw=1.2)
    axis.axhline(0.1, color="gray", ls=":", lw=1.2)
    axis.text(0, network_accuracy + 0.012, "the trained network's own head", color="#2a6fbb", fontsize=9)
    axis.text(1, 0.112, "chance", color="gray", fontsize=9)
    last = len(trained) - 1
    axis.text(last + 0.15, trained[f"blocks.{last - 1}"] - 0.05, "trained", color="#2a6fbb")
    axis.text(last + 0.15, untrained[f"blocks.{last - 1}"], "random\nweights", color="#c8553d", va="center")
    axis.set_xticks(places, list(trained), rotation=30, ha="right")
    axis.set(title="Linear probes on averaged maps: digits at random places", ylim=(0, 1.05), xlim=(-0.3, last + 0.9))
    axis.set(xlabel="node", ylabel="test accuracy of the probe")
    axis.spines[["top", "right"]].set_visible(False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Probe, train, probe again, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/probes.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=500, help="steps of training (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    images, classes = make_images(generator)
    is_test = (torch.arange(len(images)) % (len(images) // 2)) >= 1300  # both copies of a digit are on the same side
    network = Network().eval()
    untrained = probe_all(network, images, classes, is_test)
    train(network, images[~is_test], classes[~is_test], arguments.steps, generator)
    trained = probe_all(network, images, classes, is_test)
    with torch.no_grad():
        accuracy = (network(images[is_test]).argmax(1) == classes[is_test]).float().mean().item()
    print(f"test accuracy of the trained network: {accuracy:.1%}; of a probe of the pixels: ", end="")
    print(f"{probe(images.flatten(1), classes, is_test):.1%}\n\nprobe at   random weights  trained")
    for name in trained:
        print(f"{name:10} {untrained[name]:14.1%}  {trained[name]:7.1%}")
    draw(trained, untrained, accuracy, arguments.output)
    print(f"\nThe accuracies are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
