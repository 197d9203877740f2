"""Train a head on a partly frozen backbone in two processes, and compare with one process on the whole batches.

    python examples/distributed.py --output output/distributed.png

`DistributedDataParallel` wraps an extractor like any module; make the extractor of the plain model first. The processes
talk by gloo on the CPU and meet in a file. Each sees one half of every batch, so the mean of their gradients is the
gradient of the batch, and the weights must be those of one process within float error. That needs layers that compute
each image alone: the batch norms of the backbone keep their statistics (`frozen_batch_norm=True`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import featx

try:
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
    from torchvision.models import resnet18
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

PROCESSES, BATCH = 2, 32


class Classifier(nn.Module):
    """A backbone whose first stages are frozen, and a head on two of its maps."""

    def __init__(self) -> None:
        super().__init__()
        model = resnet18(weights=None, num_classes=10)
        images = torch.rand(2, 3, 32, 32)
        strides = {8: "C3", 16: "C4"}
        self.backbone = featx.create_backbone(model, strides, frozen_batch_norm=True, example_inputs=images)
        self.backbone.freeze("layer2")
        self.head = nn.Linear(sum(self.backbone.channels), 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, of shape (batch, 10)."""
        maps = self.backbone(images)
        return self.head(torch.cat([value.mean((2, 3)) for value in maps.values()], dim=1))


def digits(steps: int) -> tuple[Tensor, Tensor]:
    """Return images of shape (steps, BATCH, 3, 32, 32) and labels, the same in each process."""
    bunch = load_digits()
    chosen = torch.randint(len(bunch.target), (steps, BATCH), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(bunch.images).float()[chosen] / 8 - 1
    images = images.repeat_interleave(4, -1).repeat_interleave(4, -2)
    return images[:, :, None].expand(-1, -1, 3, -1, -1), torch.from_numpy(bunch.target)[chosen].long()


def train(classifier: nn.Module, rank: int, processes: int, steps: int) -> list[float]:
    """Train on the part of each batch that this process has, and return its losses."""
    optimizer = torch.optim.SGD([each for each in classifier.parameters() if each.requires_grad], lr=0.05, momentum=0.9)
    losses: list[float] = []
    for images, labels in zip(*digits(steps), strict=True):
        loss = F.cross_entropy(classifier.train()(images[rank::processes]), labels[rank::processes])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(rank: int, folder: str, seed: int, steps: int) -> None:
    """Train in one of the processes, and write its weights and losses to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    torch.manual_seed(seed + rank)  # the weights of rank 0 are sent to the others
    classifier = Classifier()
    losses = train(DistributedDataParallel(classifier), rank, PROCESSES, steps)
    torch.save({"weights": classifier.state_dict(), "losses": losses}, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()


def in_processes(seed: int, steps: int) -> list[dict]:
    """Return what each process ends with."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (folder, seed, steps), nprocs=PROCESSES)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(PROCESSES)]


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference between two state dicts of the same keys."""
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


def draw(path: Path, alone: list[float], both: list[list[float]]) -> None:
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for rank, losses in enumerate(both):
        axes.plot(losses, color="0.75", lw=1, label=f"process {rank}, half of the batch")
    axes.plot(torch.tensor(both).mean(0).tolist(), color="#2e6f95", lw=3, label="mean of both processes")
    axes.plot(alone, color="#d1495b", lw=1.5, ls="--", label="one process, whole batch")
    axes.set(title="Data-parallel training of a frozen backbone and a head", xlabel="step", ylabel="cross-entropy")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train in two processes and in one, compare, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/distributed.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    arguments = parser.parse_args()
    found = in_processes(arguments.seed, arguments.steps)
    torch.manual_seed(arguments.seed)
    classifier = Classifier()
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    losses = train(classifier, 0, 1, arguments.steps)
    weights = classifier.state_dict()

    trained = [name for name, value in classifier.named_parameters() if value.requires_grad]
    frozen = [name for name in weights if name not in trained]
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
    print(f"{len(trained)} tensors are trained, {len(frozen)} are frozen\n")
    comparisons = {
        "between the two processes": largest_difference(found[0]["weights"], found[1]["weights"]),
        "between them and one process": largest_difference(found[0]["weights"], weights),
        "of frozen ones to those at first": largest_difference({name: before[name] for name in frozen}, weights),
        "of trained ones to those at first": largest_difference({name: before[name] for name in trained}, weights),
    }
    print("largest difference of weights")
    for what, difference in comparisons.items():
        print(f"  {what:34} {difference:.1e}")
    draw(arguments.output, losses, [each["losses"] for each in found])
    print(f"\nThe losses are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
