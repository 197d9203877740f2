"""Draw graphs as pages, open them in a headless Chromium, and print how long everything takes.

    python benchmarks/draw.py

Needs Chromium (on Debian: apt-get install chromium). Times in the page are of its own clock, without the compositor:
what a click, a letter typed or a frame keeps the page's thread busy for. A frame of a smooth page takes 16 ms at most.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from compare import describe_machine, print_table

import featx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "draw"))

from chromium import MISSING, Chromium, find_chromium

# What a reader does, and for how many milliseconds it keeps the page busy.
IN_THE_PAGE = """(async () => {
  const { page } = window;
  const { diagram, model } = page;
  const time = (action) => { const start = performance.now(); action(); return performance.now() - start; };
  const frames = async (move) => {
    const times = [];
    for (let frame = 0; frame < 60; frame++) {
      move();
      times.push(time(() => diagram.paint()));
      await new Promise(requestAnimationFrame);
    }
    times.sort((a, b) => a - b);
    return `${times[30].toFixed(1)} / ${times[59].toFixed(1)}`;
  };
  const result = {};
  result.unfold = time(() => { page.unfoldAll(); diagram.paint(); });
  result.near = await frames(() => diagram.pan(0, -120));
  diagram.scale = 0.25;
  result.middle = await frames(() => diagram.pan(0, -120));
  diagram.fitAll();
  result.all = await frames(() => diagram.pan(0, 1));
  result.search = time(() => page.search("relu"));
  page.search("");
  const folders = model.folders.map((_, index) => model.size + index);
  const folder = folders[Math.floor(folders.length / 2)];
  if (folders.length > 1) result.toggle = time(() => { page.toggle(folder); diagram.paint(); });
  result.choose = time(() => { page.choose(Math.floor(model.size / 2)); diagram.paint(); });
  return result;
})()"""


def chain(x: torch.Tensor) -> torch.Tensor:
    """Compute 10,000 things in no module, with a value that is read again and again."""
    first = x
    for step in range(3_300):
        x = torch.relu(x) + torch.sin(x)
        if step % 33 == 0:
            x = x * first
    return x


def deep_transformer(depth: int) -> Any:
    """Return a vision transformer of many narrow blocks."""
    model = timm.create_model("vit_tiny_patch16_224", depth=depth, embed_dim=24, num_heads=3, num_classes=8).eval()
    return featx.trace(model, torch.rand(1, 3, 224, 224))


def torchvision_model(name: str) -> Any:
    """Return the graph of a model of torchvision."""
    return featx.trace(torchvision.models.get_model(name, weights=None).eval(), torch.rand(1, 3, 224, 224))


GRAPHS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("resnet50", lambda: torchvision_model("resnet50")),
    ("densenet201", lambda: torchvision_model("densenet201")),
    ("swin_v2_b", lambda: torchvision_model("swin_v2_b")),
    ("transformer of 270 blocks", lambda: deep_transformer(270)),
    ("chain without modules", lambda: featx.symbolic_trace(chain)),
)


def measure(name: str, graph: Any, chromium: Chromium, folder: Path) -> list[str]:
    """Return the row of one graph."""
    start = time.perf_counter()
    drawing = featx.draw(graph)
    drawn = time.perf_counter()
    page = drawing.html()
    written = time.perf_counter()
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    count = len(graph.graph.nodes)
    viewer = len(featx.draw(featx.Graph()).html().encode())
    opening = time.perf_counter()
    chromium.open(path)
    opened = time.perf_counter()
    found = chromium.evaluate(IN_THE_PAGE)
    assert chromium.problems() == []
    return [
        name,
        str(count),
        f"{(drawn - start) * 1e3:.0f}",
        f"{(written - drawn) * 1e3:.0f}",
        f"{(len(page.encode()) - viewer) / count:.0f}",
        f"{(opened - opening) * 1e3:.0f}",
        f"{found['unfold']:.0f}",
        found["near"],
        found["middle"],
        found["all"],
        f"{found['search']:.1f}",
        f"{found['toggle']:.0f}" if "toggle" in found else "",
        f"{found['choose']:.0f}",
    ]


def main() -> None:
    """Print the table."""
    if find_chromium() is None:
        sys.exit(MISSING)
    torch.set_num_threads(1)
    headings = ["graph", "nodes", "draw", "html", "bytes a node", "open", "unfold all", "frame, near", "frame, middle"]
    headings += ["frame, all", "search", "fold one", "choose"]
    print(f"{describe_machine().partition(';')[0]}; ms; frames: median / worst of 60\n")
    with Chromium() as chromium, tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, make(), chromium, Path(folder)) for name, make in GRAPHS]
    print_table(headings, rows)


if __name__ == "__main__":
    main()
