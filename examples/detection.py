"""Train a detector on maps of a classifier: RetinaNet on a feature pyramid on C3 to C5 of torchvision's resnet18.

    python examples/detection.py --output output/detection.png

`featx.create_backbone` finds the maps of stride 8, 16 and 32 and leaves the head of the classifier out;
`with_neck` puts a feature pyramid after them, and torchvision's detectors take the two as their backbone. Weights are
random. The detector overfits four photos on which handwritten digits are pasted, in color, with known boxes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import featx

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from skimage import data as photos
    from sklearn.datasets import load_digits, load_sample_images
    from torchvision.models import resnet18
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.ops import FeaturePyramidNetwork, box_iou
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

SIZE = 128  # side of an image in pixels
Target = dict[str, Tensor]  # "boxes" [n, 4] as left, top, right, bottom; "labels" [n], from 1


def read_photos() -> Tensor:
    """Return four photos, the largest square in the middle of each, as [4, 3, SIZE, SIZE] in 0 to 1."""
    arrays = [photos.astronaut(), photos.coffee(), photos.chelsea(), load_sample_images().images[0]]
    images: list[Tensor] = []
    for array in arrays:
        image = torch.tensor(array).permute(2, 0, 1)[None] / 255
        side = min(image.shape[2:])
        top, left = ((length - side) // 2 for length in image.shape[2:])
        square = image[:, :, top : top + side, left : left + side]
        images.append(F.interpolate(square, size=SIZE, mode="bilinear", antialias=True))
    return torch.cat(images)


def paste_digits(images: Tensor, generator: torch.Generator, count: int = 3) -> tuple[Tensor, list[Target]]:
    """Return the images with `count` digits on each, which do not overlap, and their boxes and labels."""
    digits, images = load_digits(), images.clone()
    targets: list[Target] = []
    for image in images:
        boxes, labels = torch.empty(0, 4), []
        while len(boxes) < count:
            side = int(torch.randint(28, 57, (), generator=generator))
            top, left = torch.randint(SIZE - side, (2,), generator=generator).tolist()
            number = int(torch.randint(len(digits.images), (), generator=generator))
            ink = torch.from_numpy(digits.images[number]).float()[None, None] / 16
            ink = F.interpolate(ink, size=side, mode="bicubic")[0, 0].mul(2).sub(0.5).clamp(0, 1)
            rows, columns = (ink > 0.3).any(1).nonzero(), (ink > 0.3).any(0).nonzero()
            corners = (left + columns.min(), top + rows.min(), left + columns.max() + 1, top + rows.max() + 1)
            box = torch.tensor([corners], dtype=torch.float32)
            if box_iou(box, boxes).sum() > 0:
                continue
            color = torch.rand(3, 1, 1, generator=generator)
            color = color / color.max()
            window = image[:, top : top + side, left : left + side]
            window.lerp_(color.expand_as(window), ink.expand_as(window))
            boxes = torch.cat([boxes, box])
            labels.append(int(digits.target[number]) + 1)
        targets.append({"boxes": boxes, "labels": torch.tensor(labels)})
    return images, targets


def create_detector(images: Tensor) -> RetinaNet:
    """Return a RetinaNet on C3 to C5 of a resnet18; batch norm has the statistics of `images` and is frozen."""
    backbone = featx.create_backbone(resnet18(weights=None), strides=(8, 16, 32))
    for module in backbone.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        backbone.train()(images)
    backbone.freeze_batch_norm()
    pyramid = backbone.with_neck(FeaturePyramidNetwork(backbone.channels, 64))
    sizes = tuple(tuple(int(stride * factor) for factor in (2, 2.5, 3.2)) for stride in backbone.strides)
    anchors = AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes))
    # By default anchors whose IoU is between 0.4 and 0.5 train nothing; their boxes would be among the detections.
    return RetinaNet(
        pyramid, num_classes=11, anchor_generator=anchors, bg_iou_thresh=0.5, min_size=SIZE, max_size=SIZE,
        image_mean=[0.5] * 3, image_std=[0.25] * 3, detections_per_img=20,
    )  # fmt: skip


def train(detector: RetinaNet, images: Tensor, targets: list[Target], steps: int, rate: float = 1e-3) -> list[float]:
    """Train on all images in each step, leave the detector in eval mode, and return the losses."""
    optimizer = torch.optim.AdamW([each for each in detector.parameters() if each.requires_grad], lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    losses: list[float] = []
    detector.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.stack(list(detector(list(images), targets).values())).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(detector.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    detector.eval()
    return losses


def top_detections(detector: RetinaNet, images: Tensor, targets: list[Target]) -> list[Target]:
    """Return the detections of the highest scores, as many for each image as it has objects."""
    with torch.no_grad():
        found = detector(list(images))
    return [
        {key: value[: len(target["boxes"])] for key, value in each.items()}
        for each, target in zip(found, targets, strict=True)
    ]


def mean_iou(detections: list[Target], targets: list[Target]) -> float:
    """Return the mean over the true boxes of the best intersection over union with a detection of the same label."""
    best: list[float] = []
    for found, target in zip(detections, targets, strict=True):
        overlap = box_iou(target["boxes"], found["boxes"])
        overlap = overlap * (target["labels"][:, None] == found["labels"])
        best += [row.max().item() if row.numel() else 0.0 for row in overlap]
    return sum(best) / len(best)


def draw(images: Tensor, detections: list[Target], targets: list[Target], output: Path) -> None:
    """Draw each image with its true boxes, dashed, and the detections with their labels and scores."""
    figure = Figure(figsize=(5.6, 5.9), layout="constrained")
    title = "RetinaNet on C3 to C5 of a resnet18\ntrue boxes dashed, detections with digit and score"
    figure.suptitle(title, fontsize=10)
    for axis, image, found, target in zip(
        figure.subplots(2, len(images) // 2).flat, images, detections, targets, strict=True
    ):
        axis.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        for left, top, right, bottom in target["boxes"].tolist():
            axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, ls="--", ec="white", lw=1.2))
        for (left, top, right, bottom), label, score in zip(
            found["boxes"].tolist(), found["labels"].tolist(), found["scores"].tolist(), strict=True
        ):
            axis.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, ec="#39ff14", lw=1.6))
            text = f"{label - 1}  {score:.2f}"
            axis.text(left, top, text, fontsize=7, va="top", bbox={"fc": "#39ff14", "ec": "none", "pad": 1})
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Train, detect, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/detection.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="steps of training (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    images, targets = paste_digits(read_photos(), torch.Generator().manual_seed(arguments.seed))
    detector = create_detector(images)
    print(f"{detector.backbone.body.feature_info}\n")
    losses = train(detector, images, targets, arguments.steps)
    detections = top_detections(detector, images, targets)
    overlap = mean_iou(detections, targets)
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    print(f"mean IoU of the true boxes and the top detections of the same digit: {overlap:.2f}")
    if not (losses[-1] < 0.1 * losses[0] and overlap > 0.7):
        sys.exit("error: the detector did not overfit its images; give more --steps")
    draw(images, detections, targets, arguments.output)
    print(f"The detections are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
