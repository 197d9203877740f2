"""Time one feature of a model by featx, as it is and optimized, and by what else gives it; write docs/speed.md.

    python benchmarks/speed.py
    python benchmarks/speed.py --case resnet50 --rounds 5
    python benchmarks/speed.py --way featx --way "torchlens, halt=" --output /tmp/speed.md
    python benchmarks/speed.py --device cuda --output docs/speed-gpu.md

All ways of a table run in one process, in turn. Needs timm and transformers; of captum, torchlens, onnxruntime (with
onnx and onnxscript) and OpenVINO it takes those that are installed. On a GPU, torch's own way is CUDA graphs by
torch.compile of the model cut by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import logging
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from speed_cases import CASES, Case
from speed_peers import PEERS, Build, NotApplicableError
from torch import Tensor

_REPOSITORY = Path(__file__).resolve().parents[1]
_BATCHES = (1, 16)
_BASE = "cut by hand"
_MEMORY = ("the process grows during a call with 16 samples", "the tensors on the GPU grow in a call with 16 samples")
_ON_GPU = """Inputs and results are on the GPU. A time is that of one of ten calls, one after the other, until the last
result is there. float32 is computed as torch does by default: as TF32 in convolutions, and not in linear layers."""
# A user of a GPU calls again before the result of the last call is there.
_CALLS_ON_GPU = 10


@dataclass
class Measured:
    """What was measured of one way to get a feature, by the size of the batch."""

    build_seconds: float = 0.0
    times: dict[int, list[float]] = field(default_factory=dict)
    megabytes: float = 0.0
    error: float = 0.0
    problem: str = ""


def main() -> None:
    """Measure what the command line asks for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", default=[])
    parser.add_argument("--way", choices=list(PEERS), action="append", default=[], help="beside the cut by hand")
    parser.add_argument("--rounds", type=int, default=7, help="four times as many for one sample")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of featx.optimize for a size of a batch")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--output", type=Path, default=_REPOSITORY / "docs" / "speed.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cases = options.case or list(CASES)
    if len(cases) == 1:
        case = CASES[cases[0]]().on(torch.device(options.device))
        ways = {name: build for name, build in PEERS.items() if name in (_BASE, *(options.way or PEERS))}
        tables = [_table(case.title, _measure(case, ways, options.rounds, options.budget))]
        print(tables[0], flush=True)
    else:  # each in a process of its own, as some ways leave torch changed
        tables = [_table_of_another_process(name, options) for name in cases]
    introduction = _introduction(options.device)
    options.output.write_text("\n".join([introduction, *(table.lstrip("\n") for table in tables)]))


def _table_of_another_process(case: str, options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.md")
        command = [sys.executable, __file__, "--case", case, "--rounds", str(options.rounds)]
        command += [f"--way={way}" for way in options.way]
        command += ["--budget", str(options.budget), "--device", options.device, "--output", str(page)]
        subprocess.run(command, check=True)
        return page.read_text().removeprefix(_introduction(options.device))


def _measure(case: Case, ways: dict[str, Build], rounds: int, budget: float) -> dict[str, Measured]:
    result: dict[str, Measured] = {}
    runs: dict[str, dict[int, Callable[[], Any]]] = {}
    inputs = {size: case.inputs(size) for size in _BATCHES}
    shuffled = random.Random(0)
    with torch.no_grad():
        expected = {size: case.cut_by_hand(inputs[size]) for size in _BATCHES}
        for name, build in ways.items():
            measured = result[name] = Measured()
            case.model.eval()  # some ways leave it in train mode where they fail
            try:
                for size in _BATCHES:
                    start = time.perf_counter()
                    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                        run = build(case, inputs[size], budget)
                        found = run()
                    measured.build_seconds = max(measured.build_seconds, time.perf_counter() - start)
                    measured.error = max(measured.error, _error(expected[size].cpu(), torch.as_tensor(found).cpu()))
                    measured.times[size] = []
                    runs.setdefault(name, {})[size] = run
            except NotApplicableError:
                del result[name]
            except Exception as error:  # whatever a peer raises
                measured.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
                runs.pop(name, None)
        for size in _BATCHES:
            for _ in range(rounds if size > 1 else 4 * rounds):
                # In another order each time: threads of some libraries spin for a while after a call.
                for name, by_size in shuffled.sample(list(runs.items()), len(runs)):
                    result[name].times[size].append(_seconds(by_size[size], case.device))
        for name, by_size in runs.items():
            measure = _peak_megabytes_of_gpu if case.device.type == "cuda" else _peak_megabytes
            result[name].megabytes = measure(by_size[_BATCHES[-1]])
    return result


def _error(expected: Tensor, found: Tensor) -> float:
    if expected.shape != found.shape:
        raise ValueError(f"another value, of the shape {tuple(found.shape)}")
    return float((found.float() - expected).norm() / expected.norm())


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Return the time of a call; on a GPU of one that follows others at once, until its result is there."""
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(_CALLS_ON_GPU):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / _CALLS_ON_GPU


def _peak_megabytes_of_gpu(run: Callable[[], Any]) -> float:
    """Return by how much the tensors on the GPU grow at most during a call."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def _peak_megabytes(run: Callable[[], Any]) -> float:
    """Return by how much the memory of the process grows at most during a call (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is used
    before = _kilobytes("VmRSS")
    run()
    return max(0, _kilobytes("VmHWM") - before) / 1000


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _introduction(device: str) -> str:
    is_gpu = device != "cpu"
    where = f"an {torch.cuda.get_device_name()}" if is_gpu else f"{torch.get_num_threads()} threads of a {_processor()}"
    text = f"""One feature of each model, for batches of 1 and of 16, on {where}, without gradients. All ways of a
    table run in one process, in turn, in another order each time; times are medians. *Ratio* is the time by that of the
    model's own code, cut by hand after the feature. *Memory* is by how much {_MEMORY[is_gpu]}. *Build* is the time
    until the first result, for the slower of both batches. *Error* is |found - expected| / |expected| against the model
    cut by hand. `featx.optimize` is called for each batch, with a tolerance of 0.01 if no other is named.
    {_ON_GPU if is_gpu else "On a GPU: [speed-gpu.md](speed-gpu.md)."} {_versions()}."""
    title = f"# How fast a feature is, by featx and by what else gives it{', on a GPU' if is_gpu else ''}"
    written = "Written by `benchmarks/speed.py`; do not edit."
    return f"{title}\n\n{textwrap.fill(' '.join([written, *text.split()]), 120, break_on_hyphens=False)}\n"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in (
        "torch",
        "torchvision",
        "timm",
        "transformers",
        "captum",
        "torchlens",
        "nnsight",
        "onnxruntime",
        "openvino",
    ):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _table(title: str, found: dict[str, Measured]) -> str:
    hand = {size: statistics.median(found[_BASE].times[size]) for size in _BATCHES}
    lines = [
        f"\n## {title}\n",
        "| way | 1: ms | 1: ratio | 16: ms | 16: ratio | memory, MB | build, s | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    missing: list[str] = []
    for way, measured in found.items():
        if measured.problem:
            missing.append(f"{way} ({measured.problem})")
            continue
        cells: list[str] = []
        for size in _BATCHES:
            took = statistics.median(measured.times[size])
            cells += [f"{1000 * took:.1f}", f"{took / hand[size]:.2f}"]
        cells += [f"{measured.megabytes:.0f}", f"{measured.build_seconds:.1f}"]
        lines.append(f"| {way} | {' | '.join(cells)} | {measured.error:.0e} |")
    if missing:
        lines.append(f"\nNot in the table: {'; '.join(missing)}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
