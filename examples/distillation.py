"""Distil a convolutional network into a smaller one that sees few images, with and without matching of layers.

    python examples/distillation.py --output output/distillation.png

The teacher learns 1200 of scikit-learn's digits, the student sees 40 of them. An extractor of each returns logits and
maps in one pass. `Feature(apply=...)` puts a learned 1x1 convolution after a map of the student, as a part of its
extractor, so that it has as many channels as the teacher's: Romero et al., "FitNets" (2015). The loss is the
cross-entropy of the labels, the KL divergence of Hinton et al., "Distilling the Knowledge in a Neural Network" (2015),
and, with matching, the mean squared error of the maps. Matching slows the student at first; in the end it is better.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featx
from featx import Feature

try:
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

TEACHER_IMAGES, STUDENT_IMAGES = 1200, 40
TEACHER_WIDTH, STUDENT_WIDTH = 32, 8
MATCHED = ("stage1", "stage2")
TEMPERATURE = 3.0


class Network(nn.Module):
    """Two stages of convolutions on images of 8x8, and a linear classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stage1 = self.stage(1, width)
        self.stage2 = self.stage(width, 2 * width)
        self.classifier = nn.Linear(2 * width * 4, 10)

    @staticmethod
    def stage(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.stage2(self.stage1(images)).flatten(1))


def digits() -> tuple[Tensor, Tensor]:
    """Return images of shape (1797, 1, 8, 8) in 0 to 1, and labels, in a random order."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target))
    return torch.from_numpy(bunch.images)[order, None].float() / 16, torch.from_numpy(bunch.target)[order].long()


def train_teacher(images: Tensor, labels: Tensor, steps: int) -> Network:
    teacher = Network(TEACHER_WIDTH)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        loss = F.cross_entropy(teacher(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher.eval()


def teacher_extractor(teacher: Network, images: Tensor) -> nn.Module:
    """Return an extractor of the logits and of the maps that are matched."""
    wanted = {"output": "logits", **{name: name for name in MATCHED}}
    return featx.create_feature_extractor(teacher, wanted, example_inputs=images).requires_grad_(False)


def student_extractor(student: Network, images: Tensor) -> nn.Module:
    """Return the same of the student, whose maps go through 1x1 convolutions that are trained with it."""
    channels = {"stage1": (STUDENT_WIDTH, TEACHER_WIDTH), "stage2": (2 * STUDENT_WIDTH, 2 * TEACHER_WIDTH)}
    wanted: dict[str, str | Feature] = {"output": "logits"}
    wanted.update({name: Feature(name, apply=nn.Conv2d(*channels[name], 1)) for name in MATCHED})
    return featx.create_feature_extractor(student, wanted, example_inputs=images)


def distillation_loss(
    found: Mapping[str, Tensor], target: Mapping[str, Tensor], labels: Tensor, matching: float
) -> Tensor:
    """Return cross-entropy, KL divergence of the softened logits, and `matching` times the error of the maps."""
    soft = F.log_softmax(found["logits"] / TEMPERATURE, 1), F.log_softmax(target["logits"] / TEMPERATURE, 1)
    loss = F.cross_entropy(found["logits"], labels)
    loss = loss + TEMPERATURE**2 * F.kl_div(*soft, reduction="batchmean", log_target=True)
    return loss + matching * torch.stack([F.mse_loss(found[name], target[name]) for name in MATCHED]).sum()


def train_student(
    teach: nn.Module, images: Tensor, labels: Tensor, test: tuple[Tensor, Tensor], matching: float, steps: int
) -> tuple[list[int], list[float]]:
    """Train a student, and return steps and its accuracies on the test set at these steps."""
    student = Network(STUDENT_WIDTH)
    extractor = student_extractor(student, images)
    optimizer = torch.optim.AdamW(extractor.parameters(), lr=3e-3)
    places, accuracies = list[int](), list[float]()
    for step in range(steps + 1):
        if step % 10 == 0:
            student.eval()
            with torch.no_grad():
                accuracies.append((student(test[0]).argmax(1) == test[1]).float().mean().item())
            places.append(step)
        batch = torch.randperm(len(images))[:20]
        loss = distillation_loss(extractor.train()(images[batch]), teach(images[batch]), labels[batch], matching)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return places, accuracies


def draw(path: Path, curves: Mapping[str, tuple[list[int], Tensor]], teacher: float) -> None:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(100 * teacher, color="0.4", ls="--", lw=1, label=f"teacher, {TEACHER_IMAGES} images")
    for color, (name, (steps, accuracies)) in zip(("#2e6f95", "#d1495b"), curves.items(), strict=True):
        mean, least, most = accuracies.mean(0), accuracies.amin(0), accuracies.amax(0)
        axes.plot(steps, (100 * mean).tolist(), color=color, label=f"student, {name}")
        band = (100 * least).tolist(), (100 * most).tolist()
        axes.fill_between(steps, *band, color=color, alpha=0.15, linewidth=0)
    axes.set(title=f"Distillation on {STUDENT_IMAGES} images of digits", xlabel="step", ylabel="test accuracy (%)")
    axes.set_ylim(0, 101)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", title="mean and range over seeds", title_fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train a teacher, and students of several seeds in both ways, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/distillation.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=400, help="of each student (default: %(default)s)")
    parser.add_argument("--students", type=int, default=5, help="of each kind (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    images, labels = digits()
    teacher = train_teacher(images[:TEACHER_IMAGES], labels[:TEACHER_IMAGES], steps=250)
    test = images[TEACHER_IMAGES:], labels[TEACHER_IMAGES:]
    with torch.no_grad():
        teacher_accuracy = (teacher(test[0]).argmax(1) == test[1]).float().mean().item()
    print(f"teacher: {100 * teacher_accuracy:.1f}% on {len(test[0])} images")
    few, few_labels = images[:STUDENT_IMAGES], labels[:STUDENT_IMAGES]
    teach = teacher_extractor(teacher, few)
    curves: dict[str, tuple[list[int], Tensor]] = {}
    for name, matching in (("logits alone", 0.0), ("logits and layers", 100.0)):
        runs: list[list[float]] = []
        for number in range(arguments.students):
            torch.manual_seed(1000 * (arguments.seed + 1) + number)
            places, accuracies = train_student(teach, few, few_labels, test, matching, arguments.steps)
            runs.append(accuracies)
        curves[name] = places, torch.tensor(runs)
        print(f"student, {name}: {100 * curves[name][1][:, -1].mean():.1f}% after {arguments.steps} steps")
    draw(arguments.output, curves, teacher_accuracy)
    print(f"The accuracies are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
