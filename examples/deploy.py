"""Deploy an extractor: torch.compile, torch.export, ONNX, and code that needs torch alone; how far each differs.

    python examples/deploy.py --model mobilenet_v3_small --size 96 --folder output/deploy

An extractor is a module, so torch's own tools take it. Each way out is compared with the extractor on a batch of
another size than the one that it was made with. ONNX needs `pip install onnx onnxscript onnxruntime`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import torch
from torch import Tensor, nn

import featx

try:
    from torchvision.models import get_model
except ModuleNotFoundError as missing:
    sys.exit(f'{missing.name} is not installed, and this example needs it: pip install "featx[examples]"')

Way = Callable[[Tensor], Mapping[str, Tensor]]
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
# What the code written by to_folder runs in: a process that has no featx.
ALONE = """
import sys
import torch
sys.modules["featx"] = None
sys.path.insert(0, sys.argv[1])
from extractor import Extractor
with torch.inference_mode():
    torch.save(Extractor().eval()(torch.load(sys.argv[2])), sys.argv[3])
"""


def compiled(extractor: nn.Module, backend: str) -> Way:
    """Compile as one graph, with no break."""
    return torch.compile(extractor, backend=backend, fullgraph=True)


def exported(extractor: nn.Module, images: Tensor) -> torch.export.ExportedProgram:
    """Export with a batch of any size."""
    batch = torch.export.Dim("batch", min=1, max=1024)
    return torch.export.export(extractor, (images,), dynamic_shapes=({0: batch},))


def onnx_session(program: torch.export.ExportedProgram, keys: list[str], path: Path) -> Way:
    """Write an ONNX file, and return a function that runs it in onnxruntime."""
    import onnxruntime

    torch.onnx.export(program, (), path, dynamo=True, output_names=keys, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Mapping[str, Tensor]:
        values = session.run(keys, {name: images.numpy()})
        return {key: torch.from_numpy(value) for key, value in zip(keys, values, strict=True)}

    return run


def written_code(extractor: featx.GraphModule, folder: Path) -> Way:
    """Write the extractor as Python code, and return a function that runs that in a process without featx."""
    extractor.to_folder(folder / "extractor", "Extractor", pickled=False)
    given, found = folder / "images.pt", folder / "features.pt"

    def run(images: Tensor) -> Mapping[str, Tensor]:
        torch.save(images, given)
        subprocess.run([sys.executable, "-c", ALONE, str(folder), str(given), str(found)], check=True)
        return torch.load(found)

    return run


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a feature, relative to its largest value.

    Raises:
        ValueError: the keys differ.
    """
    if set(found) != set(expected):
        raise ValueError(f"the keys are {list(found)}, those of the extractor {list(expected)}")
    return max(((found[key] - value).abs().max() / value.abs().max()).item() for key, value in expected.items())


def ways(extractor: featx.GraphModule, images: Tensor, folder: Path, backend: str) -> dict[str, Way | str]:
    """Return functions that compute the features by name, or why there is none."""
    program = exported(extractor, images)
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    return {
        f"torch.compile ({backend})": compiled(extractor, backend),
        "torch.export": program.module(),
        "ONNX": f"pip install {' '.join(missing)}"
        if missing
        else onnx_session(program, [info.key for info in extractor.feature_info], folder / "extractor.onnx"),
        "to_folder, without featx": written_code(extractor, folder),
    }


def main() -> None:
    """Make an extractor, deploy it in each way, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mobilenet_v3_small", help="a classifier of torchvision")
    nodes = "features.3,features.8,output"
    parser.add_argument("--nodes", default=nodes, help="names of nodes of the model (default: %(default)s)")
    parser.add_argument("--size", type=int, default=96, help="height and width of images (default: %(default)s)")
    default = "inductor" if which("c++") or which("g++") or which("clang++") else "aot_eager"
    parser.add_argument("--backend", default=default, help="of torch.compile (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("output/deploy"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    model = get_model(arguments.model, weights=None).eval()
    images = torch.rand(2, 3, arguments.size, arguments.size)
    wanted = {name: name for name in arguments.nodes.split(",")}
    extractor = featx.create_feature_extractor(model, wanted, example_inputs=images)
    others = torch.rand(3, 3, arguments.size, arguments.size)
    with torch.inference_mode():
        expected = extractor(others)
    print(f"{'way out':28} largest relative difference of {', '.join(expected)}")
    with torch.no_grad():
        for name, way in ways(extractor, images, arguments.folder, arguments.backend).items():
            what = way if isinstance(way, str) else f"{largest_difference(way(others), expected):.1e}"
            print(f"{name:28} {what}")
    print(f"\nThe code and the ONNX file are in {arguments.folder}")


if __name__ == "__main__":
    main()
