"""Attention maps: where each head of a small vision transformer looks, and attention rollout through all blocks.

    python examples/attention_maps.py --output output/attention_maps.png

timm's transformer computes its attention by a fused kernel, which never has the probabilities. An extractor returns
them by name, `blocks.*.attn.probabilities`, and computes them beside the fused calls, which stay as they are: the run
checks that the logits are those of the model, bit for bit. Rollout multiplies the probabilities of all blocks, with the
residual connections (Abnar and Zuidema, Quantifying Attention Flow in Transformers, 2020).
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
    import timm
    from matplotlib.figure import Figure
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

CANVAS, DIGIT, PATCH = 24, 12, 4  # sides in pixels


def create_model(depth: int = 4) -> nn.Module:
    """Return a vision transformer with random weights for canvases of one channel."""
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=CANVAS, patch_size=PATCH, in_chans=1, num_classes=10,
        depth=depth, embed_dim=64, num_heads=4,
    )  # fmt: skip


def read_digits(is_test: bool) -> tuple[Tensor, Tensor]:
    """Return images of digits, [n, DIGIT, DIGIT] in 0 to 1, and their classes; the last 297 are for tests."""
    data = load_digits()
    part = slice(1500, None) if is_test else slice(1500)
    images = torch.from_numpy(data.images[part]).float()[:, None] / 16
    return F.interpolate(images, size=DIGIT, mode="bilinear")[:, 0], torch.from_numpy(data.target[part])


def make_scenes(count: int, digits: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Paste a digit at a random place of each of `count` noisy canvases.

    Returns:
        Images [count, 1, CANVAS, CANVAS], classes [count], and which patches the digit touches, as booleans
        [count, patches].
    """
    images, classes = digits
    scenes = 0.3 * torch.rand(count, 1, CANVAS, CANVAS, generator=generator)
    is_digit = torch.zeros(count, 1, CANVAS, CANVAS)
    chosen = torch.randint(len(images), (count,), generator=generator)
    corners = PATCH * torch.randint((CANVAS - DIGIT) // PATCH + 1, (count, 2), generator=generator)
    for scene, mask, number, (top, left) in zip(scenes, is_digit, chosen, corners.tolist(), strict=True):
        window = (0, slice(top, top + DIGIT), slice(left, left + DIGIT))
        scene[window] = torch.maximum(scene[window], images[number])
        mask[window] = 1.0
    return scenes, classes[chosen], F.max_pool2d(is_digit, PATCH).flatten(1) > 0


def train(model: nn.Module, steps: int, generator: torch.Generator, batch: int = 64) -> None:
    """Train with cross-entropy on new scenes, and leave the model in eval mode."""
    digits = read_digits(is_test=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        scenes, classes, _ = make_scenes(batch, digits, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(scenes), classes).backward()
        optimizer.step()
        schedule.step()
    model.eval()


def rollout(probabilities: list[Tensor]) -> Tensor:
    """Return how much of each token reaches each token of the last block, [n, tokens, tokens]; rows sum to 1.

    Args:
        probabilities: of each block from the first to the last, [n, heads, tokens, tokens].
    """
    flow = torch.eye(probabilities[0].shape[-1])
    for each in probabilities:
        mixed = 0.5 * each.mean(1) + 0.5 * torch.eye(each.shape[-1])  # half of it passes by on the residual connection
        flow = mixed @ flow
    return flow


def as_map(attention: Tensor) -> Tensor:
    """Return the row of the class token in [..., tokens, tokens] as a map of patches, without the token itself."""
    return attention[..., 0, 1:].unflatten(-1, (CANVAS // PATCH, CANVAS // PATCH))


def share_on_digit(attention: Tensor, is_digit: Tensor) -> float:
    """Return the part of what the class token takes from patches, [n, tokens, tokens], that is from the digit's."""
    row = attention[:, 0, 1:]
    return ((row * is_digit).sum(1) / row.sum(1)).mean().item()


def draw(scene: Tensor, attention: list[Tensor], flow: Tensor, output: Path) -> None:
    """Draw a scene, [1, CANVAS, CANVAS], the attention of its class token by block and head, and the rollout."""
    heads = attention[0].shape[0]
    figure = Figure(figsize=(1.75 * (heads + 1) + 1.0, 1.75 * len(attention) + 0.7), layout="constrained")
    figure.suptitle("What the class token attends to, each map against its own maximum")
    axes = figure.subplots(len(attention), heads + 1)
    for number, (row, values) in enumerate(zip(axes, attention, strict=True)):
        for head in range(heads):
            row[head + 1].imshow(as_map(values[head]).numpy(), cmap="magma", vmin=0)
            if number == 0:
                row[head + 1].set_title(f"head {head}", fontsize=10)
        row[1].set_ylabel(f"block {number}", fontsize=11)
    axes[0][0].imshow(scene[0].numpy(), cmap="gray", vmin=0, vmax=1)
    axes[0][0].set_title("image", fontsize=10)
    axes[1][0].imshow(as_map(flow).numpy(), cmap="magma", vmin=0)
    axes[1][0].set_title("rollout, all blocks", fontsize=10)
    axes[2][0].imshow(scene[0].numpy(), cmap="gray", vmin=0, vmax=1)
    heat = F.interpolate(as_map(flow)[None, None], size=CANVAS, mode="bilinear")[0, 0]
    axes[2][0].imshow(heat.numpy(), cmap="magma", alpha=(heat / heat.max()).numpy() * 0.8)
    axes[2][0].set_title("rollout over image", fontsize=10)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    for row in axes[3:]:
        row[0].set_axis_off()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main() -> None:
    """Train, look into the attention, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/attention_maps.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=500, help="steps of training (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    model = create_model()
    train(model, arguments.steps, generator)
    extractor = featx.create_feature_extractor(model, {"blocks.*.attn.probabilities": "block *", "output": "logits"})
    print(f"{extractor.feature_info}\n")
    scenes, classes, is_digit = make_scenes(300, read_digits(is_test=True), generator)
    with torch.no_grad():
        found = extractor(scenes)
        logits, expected = found.pop("logits"), model(scenes)
    if not torch.equal(logits, expected):
        sys.exit("error: the logits are not those of the model")
    print("the logits are those of the fused model, bit for bit")
    print(f"test accuracy: {(logits.argmax(1) == classes).float().mean():.1%}")
    print(f"the digit touches {is_digit.float().mean():.1%} of the patches; its share of the class token's attention:")
    for key, value in found.items():
        print(f"  {key}: {share_on_digit(value.mean(1), is_digit):.1%}")
    flow = rollout(list(found.values()))
    print(f"  rollout: {share_on_digit(flow, is_digit):.1%}")
    draw(scenes[0], [value[0] for value in found.values()], flow[0], arguments.output)
    print(f"The attention is drawn in {arguments.output}")


if __name__ == "__main__":
    main()
