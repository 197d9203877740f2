"""Turn a model of torchvision into a page that shows its graph, to be opened in any browser.

    python examples/draw_model.py resnet50 --output output/resnet50.html

The ending of the output says what is written: .html, .svg (which needs Graphviz) or .dot.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import featx

try:
    from torchvision import models
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')


def main() -> None:
    """Trace, draw and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="resnet50", help="name of a classifier of torchvision")
    parser.add_argument("--output", type=Path, help="default: output/MODEL.html")
    parser.add_argument("--size", type=int, default=224, help="height and width of the image (default: %(default)s)")
    parser.add_argument("--depth", type=int, help="levels of modules that are open at first (default: what fits)")
    parser.add_argument("--highlight", action="append", default=[], help="a node to mark, by name; may be repeated")
    arguments = parser.parse_args()
    output: Path = arguments.output or Path("output") / f"{arguments.model}.html"
    try:
        model = models.get_model(arguments.model, weights=None).eval()
        traced = featx.trace(model, torch.rand(1, 3, arguments.size, arguments.size))
        drawing = featx.draw(traced, depth=arguments.depth, highlight=arguments.highlight)
        output.parent.mkdir(parents=True, exist_ok=True)
        drawing.save(output)
    except (ValueError, OSError, featx.FeatxError) as error:
        sys.exit(str(error))
    print(f"{len(traced.graph.nodes)} nodes of {arguments.model} are in {output}; open it in a browser")


if __name__ == "__main__":
    main()
