"""Say what a torchvision classifier costs, how long its nodes take, and which ceiling of the device holds them back.

    python examples/cost_and_profile.py --model mobilenet_v3_small --size 160 --plot output/roofline.png

Weights are random. The ceilings are measured on this machine, or given with --peak-flops and --peak-bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import featx
from featx.passes import Peaks, measure_peaks, roofline

try:
    from torchvision.models import get_model
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')


def main() -> None:
    """Count, measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18", help="a classifier of torchvision (default: %(default)s)")
    parser.add_argument("--size", type=int, default=224, help="height and width of images (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="images in a batch (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="runs that are measured (default: %(default)s)")
    parser.add_argument("--peak-flops", type=float, help="operations in a second that the device can do")
    parser.add_argument("--peak-bytes", type=float, help="bytes in a second that its memory can move")
    parser.add_argument("--plot", type=Path, help="where to write a picture of the roofline")
    arguments = parser.parse_args()
    try:
        model = get_model(arguments.model, weights=None).eval().to(arguments.device)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    images = torch.rand(arguments.batch, 3, arguments.size, arguments.size, device=arguments.device)
    with torch.inference_mode():
        traced = featx.trace(model, images)
        cost = featx.cost(traced, images)
        print(f"{cost}\n")
        profile = featx.profile(traced, images, repeats=arguments.repeats)
        print(f"{profile.module_table(depth=1)}\n")
    if arguments.peak_flops and arguments.peak_bytes:
        peaks = Peaks(arguments.peak_flops, arguments.peak_bytes)
    else:
        peaks = measure_peaks(arguments.device)
    found = roofline(profile, cost, peaks)
    print(found)
    if arguments.plot:
        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        found.plot(arguments.plot)
        print(f"\nThe roofline is drawn in {arguments.plot}")


if __name__ == "__main__":
    main()
