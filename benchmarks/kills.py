"""Kill bulk extractions at random moments, and write docs/kills.md: what was lost and what was doubled.

    python benchmarks/kills.py --count 50
    python benchmarks/kills.py --count 50 --engine ray --output /tmp/kills.md

Each run starts a job in a process of its own, kills one of its processes with SIGKILL after a random time, starts the
job again until it is done, and compares the files with those of a job that nothing has disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

import featx

_REPOSITORY = Path(__file__).resolve().parents[1]
_SAMPLES, _ROWS = 60, 5
_JOB = """
import os, sys, time, torch, featx
torch.manual_seed(0)
torch.set_num_threads(1)
photos, output, engine = sys.argv[1:]
from torch import nn
net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
class Slow:
    def __call__(self, image):
        time.sleep(0.1 if engine == 'ray' else 0.03)  # whose job begins to count when a first part is there
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(32, 32, 3).permute(2, 0, 1) / 255
    def __repr__(self):
        return "Slow()"
options = dict(transform=Slow(), batch_size=2, rows_per_shard=5, progress=False)
if engine == "ray":
    import ray
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    print("started", flush=True)
    featx.extract(net.eval(), ["3"], photos, output, engine="ray", actors=2, workers=0, **options)
else:
    print("started", flush=True)
    featx.extract(net.eval(), ["3"], photos, output, workers=1, **options)
"""
_ABOUT = """\
# Killed jobs

Written by `benchmarks/kills.py`; do not edit. Made with featx {featx}: {samples} images in shards of {rows}. In each
run one process of a job was killed (SIGKILL) after a random time, the job was started again until it was done, and its
files were compared with those of a job that nothing has disturbed. Lost and doubled count keys; the same bytes, runs.

| killed | runs | not done after the kill | rows lost | rows doubled | the same bytes |
| --- | --- | --- | --- | --- | --- |
{table}
"""


def main() -> None:
    """Run the benchmark, and write its page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=50, help="runs of each kind without Ray; a third with it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["local", "ray"], help="only the processes of one; by default both")
    parser.add_argument("--output", type=Path, default=_REPOSITORY / "docs" / "kills.md")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        photos, expected = Path(folder) / "photos", Path(folder) / "expected"
        _make_photos(photos)
        _start("local", photos, expected).wait()
        known = _parts(expected)
        lines: list[str] = []
        for victim, (engine, find) in _VICTIMS.items():
            if arguments.engine not in (None, engine):
                continue
            count = arguments.count if engine == "local" else -(-arguments.count // 3)
            results = [
                _run(engine, find, photos, Path(folder) / "out", known, draw.uniform(0.05, 3.5)) for _ in range(count)
            ]
            middle, lost, doubled, same = (sum(each) for each in zip(*results, strict=True))
            lines.append(f"| {victim} | {count} | {middle} | {lost} | {doubled} | {same} of {count} |")
            print(lines[-1], flush=True)
    text = _ABOUT.format(featx=_version(), samples=_SAMPLES, rows=_ROWS, table="\n".join(lines))
    arguments.output.write_text(text)


def _run(
    engine: str, find: Callable[[int], int | None], photos: Path, output: Path, known: dict[str, str], after: float
) -> tuple[int, int, int, int]:
    shutil.rmtree(output, ignore_errors=True)
    process = _start(engine, photos, output)
    assert process.stdout is not None
    process.stdout.readline()
    if engine == "ray":  # its actors take seconds to start
        while not _parts(output) and process.poll() is None:
            time.sleep(0.02)
        after *= 0.7
    time.sleep(after)
    victim = find(process.pid)
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    was_in_the_middle = len(_parts(output)) < len(known)
    while _start(engine, photos, output).wait() != 0:
        pass
    table = featx.open_features(output)
    keys = table.keys
    lost = _SAMPLES - len(set(keys))
    return int(was_in_the_middle), lost, len(keys) - len(set(keys)), int(_parts(output) == known)


def _start(engine: str, photos: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _JOB, str(photos), str(output), engine]
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)


def _make_photos(folder: Path) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(_SAMPLES):
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number:03d}.png")


def _parts(folder: Path) -> dict[str, str]:
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.glob("part-*")}


def _processes() -> dict[int, tuple[int, str]]:
    found = subprocess.run(["ps", "-ewwo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()[1:]]
    return {int(row[0]): (int(row[1]), row[2] if len(row) > 2 else "") for row in rows}


def _itself(pid: int) -> int | None:
    return pid


def _below(pid: int, text: str) -> int | None:
    known = _processes()

    def is_below(each: int) -> bool:
        parent = known[each][0]
        return parent == pid or (parent in known and parent != 0 and is_below(parent))

    return next((each for each, (_, command) in known.items() if text in command and is_below(each)), None)


def _version() -> str:
    from importlib.metadata import version

    return version("featx")


_VICTIMS: dict[str, tuple[str, Callable[[int], int | None]]] = {
    "the process of the job": ("local", _itself),
    "a process that reads": ("local", lambda pid: _below(pid, "-c")),
    "an actor of Ray": ("ray", lambda pid: _below(pid, "ray::_Actor")),
    "the raylet": ("ray", lambda pid: _below(pid, "raylet/raylet")),
    "the driver of Ray": ("ray", _itself),
}

if __name__ == "__main__":
    main()
