"""Embed crops of scikit-image's photos at two depths of a network, find nearest neighbours by faiss, and draw them.

    python examples/neighbours.py --output output/neighbours.png

`featx.extract` writes the features of a folder of images to Parquet files: pooled vectors of `layer1` and of `layer4`,
from one pass. faiss searches in them. The network has random weights, as nothing is downloaded, and its features still
know textures and colours: the neighbours of a crop are crops of the same photo far more often than by chance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import featx
from featx import Feature

try:
    import faiss
    import skimage.data
    import torchvision
    from matplotlib.figure import Figure
    from PIL import Image
    from torchvision.transforms import v2
except ModuleNotFoundError as missing:
    sys.exit(
        f'{missing.name} is not installed, and this example needs it: pip install "featx[examples,extract]" faiss-cpu'
    )

PHOTOS = (
    "astronaut", "coffee", "chelsea", "rocket", "immunohistochemistry", "hubble_deep_field", "camera", "brick",
    "grass", "gravel", "coins", "moon", "page", "clock", "horse",
)  # fmt: skip
DEPTHS = {"layer1": "shallow", "layer4": "deep"}


def write_crops(folder: Path, each: int) -> None:
    """Write `each` random crops of every photo, as `folder/<photo>/<number>.png`."""
    cut = v2.RandomCrop(128, pad_if_needed=True, padding_mode="reflect")
    for name in PHOTOS:
        photo = Image.fromarray(getattr(skimage.data, name)()).convert("RGB")
        (folder / name).mkdir(parents=True)
        for number in range(each):
            cut(photo).save(folder / name / f"{number:02d}.png")


def embed(crops: Path, output: Path) -> featx.FeatureTable:
    """Return vectors of two depths for each crop, which lie in `output`."""
    model = torchvision.models.resnet18(weights=None).eval()
    wanted: dict[Any, Any] = {name: Feature(key, pool="avg") for name, key in DEPTHS.items()}
    transform = v2.Compose(
        [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    )
    return featx.extract(model, wanted, crops, output, transform=transform, batch_size=16, progress=False)


def nearest(vectors: Tensor, count: int) -> Tensor:
    """Return the numbers of the `count` nearest others of each vector, by the cosine about their mean."""
    centred = (vectors - vectors.mean(0)).numpy().copy()
    faiss.normalize_L2(centred)
    index = faiss.IndexFlatIP(centred.shape[1])
    index.add(centred)
    found = torch.from_numpy(index.search(centred, count + 1)[1])
    numbers = torch.arange(len(found))[:, None]
    return torch.stack([row[row != number][:count] for row, number in zip(found, numbers, strict=True)])


def hits(neighbours: Tensor, keys: list[str]) -> float:
    """Return how many of the neighbours are crops of the same photo, as a part of all."""
    photos = torch.tensor([PHOTOS.index(key.partition("/")[0]) for key in keys])
    return (photos[neighbours] == photos[:, None]).float().mean().item()


def draw(path: Path, crops: Path, keys: list[str], found: dict[str, Tensor], queries: list[int]) -> None:
    """Draw each query with its neighbours at both depths."""
    count = next(iter(found.values())).shape[1]
    figure = Figure(figsize=(1.15 * (2 * count + 2), 1.25 * len(queries) + 0.4), layout="constrained")
    axes = figure.subplots(len(queries), 2 * count + 1, squeeze=False)
    for row, query in zip(axes, queries, strict=True):
        numbers = [query, *(int(each) for depth in found.values() for each in depth[query])]
        for place, (cell, number) in enumerate(zip(row, numbers, strict=True)):
            cell.imshow(Image.open(crops / keys[number]))
            is_same = keys[number].partition("/")[0] == keys[query].partition("/")[0]
            cell.set_xticks([])
            cell.set_yticks([])
            for spine in cell.spines.values():
                spine.set(color="0.2" if not place else "#2e8b57" if is_same else "#d1495b", linewidth=2)
    axes[0, 0].set_title("query", fontsize="small")
    for place, name in enumerate(DEPTHS):
        axes[0, 1 + place * count].set_title(f"nearest by {name}", fontsize="small", loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=60)


def main() -> None:
    """Write crops, embed them, search, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/neighbours.png"), help="default: %(default)s")
    parser.add_argument("--crops", type=int, default=12, help="of each photo (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        crops = Path(folder) / "crops"
        write_crops(crops, arguments.crops)
        table = embed(crops, Path(folder) / "features")
        print(table)
        found = {key: nearest(table.tensor(key), 4) for key in DEPTHS.values()}
        chance = (arguments.crops - 1) / (len(table) - 1)
        for name, key in DEPTHS.items():
            print(f"{name}: {100 * hits(found[key], table.keys):.0f}% of the neighbours are of the same photo", end="")
            print(f", {100 * chance:.0f}% by chance")
        queries = [table.keys.index(f"{name}/00.png") for name in ("astronaut", "coffee", "chelsea", "coins", "gravel")]
        draw(arguments.output, crops, table.keys, found, queries)
    print(f"The neighbours are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
