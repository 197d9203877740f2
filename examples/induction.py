"""Find an induction circuit by activation patching, in a small transformer that is trained here.

    python examples/induction.py --output output/induction.png

A transformer of two attention layers learns to continue sequences that repeat a random block. It learns the circuit
of Olsson et al., "In-context Learning and Induction Heads" (2022): a head of layer 0 attends to the previous token, and
a head of layer 1 attends to the token that followed the last occurrence of the present one. Attention patterns are
requested as `probabilities`. `edits` set the output of one head to zero, or to that for other sequences.

The heads of a layer begin with a slight preference for the distances 0, 1, 2 and 3. Without it several heads share the
role of the previous-token head, and removing one of them does less.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import featx

try:
    from matplotlib.figure import Figure
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

TOKENS, LENGTH, WIDTH, HEADS = 24, 32, 64, 4
PERIOD = 16  # of the sequences that are looked at; in training it is random
# The output of the heads of a layer, of shape (batch, heads, places, width of a head), and their attention patterns.
OUTPUT = "layers.{}.scaled_dot_product_attention"
PATTERN = "layers.{}.probabilities"


class Attention(nn.Module):
    """Causal attention, in which each head adds a learned bias for each distance to its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(1.5 * torch.eye(HEADS, LENGTH))  # each head begins with one distance: 0, 1, 2, 3
        self.project_in, self.project_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project_in(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        places = torch.arange(LENGTH)
        distance = places[:, None] - places
        mask = self.bias[:, distance.clamp(min=0)].masked_fill(distance < 0, float("-inf"))
        heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.project_out(heads.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Two layers of attention and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sequences(batch: int, period: Tensor | int) -> Tensor:
    """Return sequences that repeat a block of `period` different random tokens, of shape (batch, LENGTH)."""
    block = torch.rand(batch, TOKENS).argsort(dim=1)
    return block.gather(1, (torch.arange(LENGTH) % period).expand(batch, -1))


def loss_on_repeats(logits: Tensor, tokens: Tensor, period: Tensor | int) -> Tensor:
    """Return the mean cross-entropy of the tokens that are predictable: those after the first of the second block."""
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    repeats = (torch.arange(1, LENGTH) > period).expand_as(losses)
    return losses[repeats].mean()


def train(steps: int, batch: int = 32) -> Transformer:
    """Train a transformer on repeated blocks of random periods, so that places alone do not tell where to look."""
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    for step in range(steps):
        period = torch.randint(6, LENGTH // 2 + 1, (batch, 1))
        tokens = sequences(batch, period)
        loss = loss_on_repeats(model(tokens), tokens, period)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 40 == 0 or step == steps - 1:
            print(f"step {step:4d}: loss on repeated tokens {loss.item():.4f}")
    return model.eval()


def with_head(value: Tensor, head: int, other: Tensor | float) -> Tensor:
    """Return the outputs of all heads with those of one replaced; an edit must not write the value that it gets."""
    is_head = (torch.arange(HEADS) == head).view(-1, 1, 1)
    return torch.where(is_head, other, value)


def run(model: nn.Module, tokens: Tensor, edits: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the attention patterns, the outputs of the heads and the logits, for a model that goes on with edits."""
    names = [name.format(layer) for name in (PATTERN, OUTPUT) for layer in (0, 1)]
    extractor = featx.create_feature_extractor(model, [*names, "output"], edits=edits, example_inputs=tokens)
    with torch.no_grad():
        return extractor(tokens)


def previous_token_scores(values: dict[str, Tensor]) -> Tensor:
    """Return how much each head of layer 0 attends from a token to the one before it."""
    return values[PATTERN.format(0)].diagonal(-1, -2, -1).mean((0, 2))


def induction_scores(values: dict[str, Tensor]) -> Tensor:
    """Return how much each head of layer 1 attends from a repeated token to what followed it the first time."""
    return values[PATTERN.format(1)].diagonal(1 - PERIOD, -2, -1)[..., 1:].mean((0, 2))


def draw(path: Path, clean: dict[str, Tensor], heads: list[int], losses: dict[str, list[float]]) -> None:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.35))
    titles = (f"Previous-token head (layer 0, head {heads[0]})", f"Induction head (layer 1, head {heads[1]})")
    for layer, (axes, title) in enumerate(zip((left, middle), titles, strict=True)):
        image = axes.imshow(clean[PATTERN.format(layer)][0, heads[layer]].numpy(), cmap="Blues", vmin=0, vmax=1)
        for start in range(PERIOD, LENGTH, PERIOD):
            axes.axvline(start - 0.5, color="0.6", lw=0.8, ls=":")
            axes.axhline(start - 0.5, color="0.6", lw=0.8, ls=":")
        axes.set(title=title, xlabel="attends to place", ylabel="place" if layer == 0 else None)
    figure.colorbar(image, ax=[left, middle], label="attention probability", shrink=0.85)
    names = [f"{layer}.{head}" for layer in (0, 1) for head in range(HEADS)]
    for shift, color, (what, values) in zip((-0.2, 0.2), ("#d1495b", "#2e6f95"), losses.items(), strict=True):
        places = [place + shift for place in range(len(names))]
        right.bar(places, values, 0.38, color=color, label=what)
    right.axhline(torch.tensor(float(TOKENS)).log().item(), color="0.5", ls="--", lw=1, label="uniform guess")
    right.set_xticks(range(len(names)), names)
    right.set(title="Loss after one head is replaced", xlabel="layer.head", ylabel="cross-entropy of repeated tokens")
    right.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, find the two heads, replace each head in turn, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("output/induction.png"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=240, help="of training (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = train(arguments.steps)
    tokens = sequences(64, PERIOD)
    clean, others = run(model, tokens), run(model, sequences(64, PERIOD))
    print(f"\nAll heads in place: loss {loss_on_repeats(clean['output'], tokens, PERIOD):.4f}")
    print(f"previous-token scores of layer 0: {[round(score, 2) for score in previous_token_scores(clean).tolist()]}")
    print(f"induction scores of layer 1:      {[round(score, 2) for score in induction_scores(clean).tolist()]}\n")

    print("layer.head  loss: set to zero  loss: of other sequences  best induction score left, set to zero")
    losses: dict[str, list[float]] = {"set to zero": [], "of other sequences": []}
    for layer in (0, 1):
        name = OUTPUT.format(layer)
        for head in range(HEADS):
            ablated = run(model, tokens, {name: partial(with_head, head=head, other=0.0)})
            patched = run(model, tokens, {name: with_head(clean[name], head, others[name])})
            for values, found in zip(losses.values(), (ablated, patched), strict=True):
                values.append(loss_on_repeats(found["output"], tokens, PERIOD).item())
            zero, other = (values[-1] for values in losses.values())
            print(f"{layer}.{head:<8} {zero:18.3f} {other:25.3f} {induction_scores(ablated).max():40.2f}")
    layers = torch.tensor(losses["of other sequences"]).view(2, HEADS)
    draw(arguments.output, clean, layers.argmax(1).tolist(), losses)
    print(f"\nAttention patterns and losses are drawn in {arguments.output}")


if __name__ == "__main__":
    main()
