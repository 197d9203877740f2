"""Similarity of layers: linear CKA between all layers of two networks that were trained from different seeds.

    python examples/similarity.py --output output/similarity.png

Two networks never have the same features: their channels stand in another order, or are mixed. Centered kernel
alignment compares which images a layer holds to be alike instead (Kornblith et al., Similarity of Neural Network
Representations Revisited, 2019). Class requests (`nn.Conv2d: "*"`) name all layers of one kind, and
`Feature(flatten=True)` makes vectors of the maps.
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
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

TRAINED = 1400  # so many digits are for training, the other 397 for the comparison


def create_network(seed: int, width: int = 32, depth: int = 8) -> nn.Sequential:
    """Return a plain convolutional network for images of 8 x 8 pixels, with random weights, in eval mode."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for number in range(depth):
        stride = 2 if number == depth // 2 else 1
        convolution = nn.Conv2d(width if number else 1, width, 3, stride=stride, padding=1, bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)))
    return nn.Sequential(*layers, nn.Sequential(nn.Flatten(), nn.Linear(16 * width, 10))).eval()


def read_digits() -> tuple[Tensor, Tensor]:
    """Return images of digits, [n, 1, 8, 8] in 0 to 1, and their classes."""
    data = load_digits()
    return torch.from_numpy(data.images).float()[:, None] / 16, torch.from_numpy(data.target)


def train(network: nn.Module, images: Tensor, classes: Tensor, steps: int, seed: int) -> None:
    """Train with cross-entropy on random batches, and leave the network in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    network.train()
    for _ in range(steps):
        batch = torch.randint(len(images), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(network(images[batch]), classes[batch]).backward()
        optimizer.step()
        schedule.step()
    network.eval()


def gram(features: Tensor) -> Tensor:
    """Return the centered matrix of dot products of the rows, [n, n], of features [n, channels], with norm 1."""
    features = features.double()
    features = features - features.mean(0)
    products = features @ features.T
    return products / products.norm()


def linear_cka(first: Tensor, second: Tensor) -> float:
    """Return the linear CKA of two sets of features of the same images, [n, channels] and [n, other channels].

    It is in 0 to 1, and stays the same where features are rotated, scaled or shifted.
    """
    return (gram(first) * gram(second)).sum().item()


def layer_features(network: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return what the ReLUs and the last linear layer return for these images, as vectors, by name."""
    request = {nn.ReLU: Feature("relu *", flatten=True), nn.Linear: Feature("linear *", flatten=True)}
    with torch.no_grad():
        return featx.create_feature_extractor(network, request)(images)


def compare(first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
    """Return the CKA of each layer of the first with each of the second, [layers, layers]."""
    others = torch.stack([gram(value).flatten() for value in second.values()])
    return torch.stack([others @ gram(value).flatten() for value in first.values()])


def draw(comparisons: dict[str, Tensor], output: Path) -> None:
    """Draw a heat map for each comparison, by its title."""
    figure = Figure(figsize=(3.7 * len(comparisons) + 0.9, 4.1), layout="constrained")
    figure.suptitle("Linear CKA between the layers of two networks")
    axes = figure.subplots(1, len(comparisons), squeeze=False)[0]
    for axis, (title, values) in zip(axes, comparisons.items(), strict=True):
        shown = axis.imshow(values.numpy(), cmap="magma", vmin=0, vmax=1, origin="lower")
        for row, column in ((row, column) for row in range(len(values)) for column in range(len(values))):
            value = values[row, column].item()
            color = "black" if value > 0.6 else "white"
            axis.text(column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=6.5, color=color)
        mine, _, other = title.partition(" and ")
        axis.set(title=title, xlabel=f"layer of {other}", ylabel=f"layer of {mine}")
        axis.set(xticks=range(len(values)), yticks=range(len(values)))
    figure.colorbar(shown, ax=axes, label="linear CKA", shrink=0.8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Train two networks, compare them, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/similarity.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first network; +1 and +2 are those of the others")
    parser.add_argument("--steps", type=int, default=400, help="steps of training (default: %(default)s)")
    arguments = parser.parse_args()
    images, classes = read_digits()
    features: dict[str, dict[str, Tensor]] = {}
    for number, name in enumerate(("network A", "network B", "an untrained one")):
        network = create_network(arguments.seed + number)
        if name != "an untrained one":
            train(network, images[:TRAINED], classes[:TRAINED], arguments.steps, arguments.seed + number)
        features[name] = layer_features(network, images[TRAINED:])
        is_right = list(features[name].values())[-1].argmax(1) == classes[TRAINED:]
        print(f"{name}: test accuracy {is_right.float().mean():.1%}")
    print(f"layers: {', '.join(features['network A'])}\n")
    first = features["network A"]
    others = {"itself": first, **{name: value for name, value in features.items() if value is not first}}
    comparisons = {f"network A and {name}": compare(first, other) for name, other in others.items()}
    for title, values in comparisons.items():
        nearest = values.argmax(1) == torch.arange(len(values))
        print(f"{title}: CKA of layers at the same depth {values.diagonal().mean():.2f} on average;", end=" ")
        print(f"the same depth is the most similar for {int(nearest.sum())} of {len(values)} layers")
    draw(comparisons, arguments.output)
    print(f"The similarities are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
