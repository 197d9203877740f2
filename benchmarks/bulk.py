"""Extract features of the same photos by featx and by other ways, and write docs/bulk-speed.md.

    python benchmarks/bulk.py --count 600
    python benchmarks/bulk.py --count 8000 --device cuda --workers 14 --output docs/bulk-speed-gpu.md

Each way runs in a process of its own, several times in turn. CPU seconds and memory (proportional set size) are those
of the process and all below it, sampled from /proc, so they are measured on Linux alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image

_REPOSITORY = Path(__file__).resolve().parents[1]
_START = """
import os, sys, glob, torch, torchvision
photos, output, device, workers = sys.argv[1:]
workers = int(workers)
torch.manual_seed(0)
net = torchvision.models.resnet18(weights=None).eval().to(device)
transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
paths = sorted(glob.glob(photos + "/*.jpg"))
from PIL import Image
def read(path):
    with Image.open(path) as image:
        return transform(image.convert("RGB"))
class Files(torch.utils.data.Dataset):
    def __len__(self): return len(paths)
    def __getitem__(self, index): return paths[index], read(paths[index])
"""
_PEER = """
from torchvision.models.feature_extraction import create_feature_extractor
extractor = create_feature_extractor(net, {"layer4": "C5"})
"""
# What it is, the package that it needs, and its code.
_WAYS: dict[str, tuple[str, str]] = {
    "reading and decoding alone": ("torch", """
for _ in torch.utils.data.DataLoader(Files(), batch_size=32, num_workers=workers): pass
"""),
    "the model alone, on one thread": ("torch", """
torch.set_num_threads(1)
x = torch.rand(32, 3, 224, 224, device=device)
with torch.inference_mode():
    for start in range(0, len(paths), 32): found = net(x[:len(paths) - start])
    found.cpu()
"""),
    "featx.extract, the model on one thread": ("featx", """
import featx
torch.set_num_threads(1)
featx.extract(net, {"layer4": featx.Feature("C5", pool="avg")}, photos, output, transform=transform, workers=workers,
              batch_size=32, progress=False)
"""),
    "the model alone": ("torch", """
x = torch.rand(32, 3, 224, 224, device=device)
with torch.inference_mode():
    for start in range(0, len(paths), 32): found = net(x[:len(paths) - start])
    found.cpu()
"""),
    "featx.extract": ("featx", """
import featx
featx.extract(net, {"layer4": featx.Feature("C5", pool="avg")}, photos, output, transform=transform, workers=workers,
              batch_size=32, progress=False)
"""),
    "featx.extract, 64 rows a file": ("featx", """
import featx
featx.extract(net, {"layer4": featx.Feature("C5", pool="avg")}, photos, output, transform=transform, workers=workers,
              batch_size=32, rows_per_shard=64, progress=False)
"""),
    "featx.extract, no other process": ("featx", """
import featx
featx.extract(net, {"layer4": featx.Feature("C5", pool="avg")}, photos, output, transform=transform, workers=0,
              batch_size=32, progress=False)
"""),
    "featx.extract, batch size by itself": ("featx", """
import featx
featx.extract(net, {"layer4": featx.Feature("C5", pool="avg")}, photos, output, transform=transform, workers=workers,
              progress=False)
"""),
    "a DataLoader loop by hand, Parquet at the end": ("pyarrow", _PEER + """
import pyarrow, pyarrow.parquet
keys, rows = [], []
with torch.inference_mode():
    for names, batch in torch.utils.data.DataLoader(Files(), batch_size=32, num_workers=workers):
        keys += names
        rows.append(extractor(batch.to(device))["C5"].mean((2, 3)).cpu())
os.makedirs(output)
values = torch.cat(rows)
array = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1).numpy()), values.shape[1])
pyarrow.parquet.write_table(pyarrow.table({"key": keys, "C5": array}), output + "/all.parquet")
"""),
    "Dataset.map of datasets": ("datasets", _PEER + """
import datasets
def features(rows):
    with torch.inference_mode():
        batch = torch.stack([read(path) for path in rows["key"]])
        return {"C5": extractor(batch.to(device))["C5"].mean((2, 3)).cpu().numpy()}
found = datasets.Dataset.from_dict({"key": paths}).map(features, batched=True, batch_size=32)
found.to_parquet(output + ".parquet")
"""),
    "Ray Data, map_batches": ("ray", _PEER + """
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
def decode(row):
    return {"key": row["key"], "image": read(row["key"]).numpy()}
class Features:
    def __init__(self): self.extractor = extractor
    def __call__(self, batch):
        with torch.inference_mode():
            found = self.extractor(torch.from_numpy(batch["image"]).to(device))["C5"].mean((2, 3)).cpu()
            return {"key": batch["key"], "C5": found.numpy()}
rows = [{"key": path} for path in paths]
data = ray.data.from_items(rows, override_num_blocks=max(1, len(paths) // 50)).map(decode)
data.map_batches(Features, batch_size=32, compute=ray.data.ActorPoolStrategy(size=1)).write_parquet(output)
"""),
    "Daft, a batch function": ("daft", _PEER + """
import daft
from daft import DataType, Series, col
@daft.func.batch(return_dtype=DataType.list(DataType.float32()))
def features(keys: Series):
    with torch.inference_mode():
        batch = torch.stack([read(path) for path in keys.to_pylist()])
        return extractor(batch.to(device))["C5"].mean((2, 3)).tolist()
frame = daft.from_pydict({"key": paths}).into_batches(32)
frame.with_column("C5", features(col("key"))).write_parquet(output)
"""),
    "timm's loader and forward_features": ("timm", """
import pyarrow, pyarrow.parquet, timm
torch.manual_seed(0)
net = timm.create_model("resnet18", pretrained=False).eval().to(device)
config = timm.data.resolve_model_data_config(net)
data = timm.data.create_dataset("", photos)
loader = timm.data.create_loader(
    data, batch_size=32, num_workers=workers, use_prefetcher=False, is_training=False, **config)
rows = []
with torch.inference_mode():
    for batch, _ in loader:
        rows.append(net.forward_head(net.forward_features(batch.to(device)), pre_logits=True).cpu())
os.makedirs(output)
values = torch.cat(rows)
array = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1).numpy()), values.shape[1])
pyarrow.parquet.write_table(pyarrow.table({"key": data.filenames(), "C5": array}), output + "/all.parquet")
"""),
    "torchlens.extract_dataset": ("torchlens", """
import torchlens
loader = torch.utils.data.DataLoader(Files(), batch_size=32, num_workers=workers)
images = (image for _, batch in loader for image in batch)
torchlens.extract_dataset(net, images, ["layer4"], batch_size=32, output_dir=output, pool="spatial_mean",
                          stimulus_ids=paths, progress=False)
"""),
}  # fmt: skip
_PHOTOS = 400
_ALONE = ("reading and decoding alone", "the model alone, on one thread", "the model alone")
_ABOUT = """\
# The speed of bulk extraction

Written by `benchmarks/bulk.py`; do not edit. Made with featx {featx}, torch {torch}, on {cores} cores{gpu}:
{count} JPEG photos of 500 x 375 pixels ({size} kB each), `layer4` of torchvision's resnet18, averaged over its places,
the same transform, as many threads as each way takes by itself, and {workers} reading process(es) where nothing else
is said. Medians of {times} run(s) in turn, each in a process of its own. Images per second count the whole process,
less its start-up, which is the time that it takes for 8 photos. CPU seconds and memory (the largest sum of proportional
set sizes) are of the process and all below it. Killed: the rows on disk when the process is killed after 60 % of its
time, and whether a second start goes on from there.

| | images/s | CPU s | start-up s | memory MB | killed |
| --- | --- | --- | --- | --- | --- |
{table}

The bound is the slower of reading and decoding alone and of the model alone{on_one}:
{bound:.1f} images a second. `featx.extract`{on_one} reaches {reached:.2f} of it.

A shard of featx is by default what a minute computes, at least 64 rows: these photos are one shard, and a kill loses up
to that. `rows_per_shard` says otherwise.
thingsvision 2.7 asks for torchvision 0.15 and numpy 1, and clip-retrieval 2.45 for numpy 1 and pyarrow below 16, so
that neither can be installed beside this torch; FiftyOne keeps its samples in a MongoDB server.
{absent}"""


@dataclass
class _Measured:
    seconds: float
    cpu: float
    memory: float


def main() -> None:
    """Run the benchmark, and write its page."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of the model: cpu or cuda")
    parser.add_argument("--workers", default="1", help="processes that read")
    parser.add_argument("--only", default="", help="a regular expression that occurs in the names of the ways")
    parser.add_argument("--output", type=Path, default=_REPOSITORY / "docs" / "bulk-speed.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        photos, few, output = Path(folder) / "photos", Path(folder) / "few", Path(folder) / "out"
        size = _make_photos(photos, few, arguments.count)
        where = (arguments.device, arguments.workers)
        known = {
            name: code
            for name, (package, code) in _WAYS.items()
            if find_spec(package) is not None and (arguments.device == "cpu" or "one thread" not in name)
            if re.search(arguments.only, name)
        }
        runs: dict[str, list[_Measured]] = {name: [] for name in known}
        starts: dict[str, list[float]] = {name: [] for name in known}
        for _ in range(arguments.times):
            for name, code in known.items():
                starts[name].append(_measured(code, few, output, where).seconds)
                runs[name].append(_measured(code, photos, output, where))
                print(name, runs[name][-1], flush=True)
        lines, rates = list[str](), dict[str, float]()
        for name, code in known.items():
            seconds, start = statistics.median(run.seconds for run in runs[name]), statistics.median(starts[name])
            rates[name] = (arguments.count - 8) / (seconds - start)
            killed = "" if name in _ALONE else _killed(code, photos, output, where, 0.6 * seconds)
            cpu, memory = (statistics.median(getattr(run, each) for run in runs[name]) for each in ("cpu", "memory"))
            lines.append(f"| {name} | {rates[name]:.1f} | {cpu:.0f} | {start:.1f} | {memory:.0f} | {killed} |")
    absent = [name for name, (package, _) in _WAYS.items() if find_spec(package) is None]
    # On a GPU one thread is as fast as all.
    on_one = ", the model on one thread" if arguments.device == "cpu" else ""
    bound = min(rates[name] for name in _ALONE if name in rates)
    text = _ABOUT.format(
        featx=version("featx"), torch=torch.__version__, cores=os.cpu_count(), count=arguments.count, size=size,
        times=arguments.times, table="\n".join(lines), bound=bound,
        reached=rates[f"featx.extract{on_one}"] / bound, on_one=on_one, workers=arguments.workers,
        gpu=f" and an {torch.cuda.get_device_name()}" if arguments.device != "cpu" else "",
        absent=f"\nNot measured, as not installed: {', '.join(absent)}.\n" if absent else "",
    )  # fmt: skip
    arguments.output.write_text(text)
    print(text)


def _make_photos(folder: Path, few: Path, count: int) -> int:
    """Write photos of about the entropy of real ones, and return their mean size in kB."""
    folder.mkdir()
    few.mkdir()
    draw = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number:05d}.jpg"
        if number >= _PHOTOS:  # reading and decoding does not know that it is another one's copy
            shutil.copy(folder / f"{number % _PHOTOS:05d}.jpg", path)
            continue
        coarse = draw.normal(128, 60, (12, 16, 3)).clip(0, 255).astype(np.uint8)
        image = np.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
        values = (image + draw.normal(0, 12, image.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(values).save(path, quality=85)
        if number < 8:
            shutil.copy(path, few)
    return sum(each.stat().st_size for each in folder.iterdir()) // count // 1000


def _start(code: str, photos: Path, output: Path, where: tuple[str, str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "HF_DATASETS_CACHE": "/tmp"}
    command = [sys.executable, "-c", _START + code, str(photos), str(output), *where]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment, start_new_session=True)


def _measured(code: str, photos: Path, output: Path, where: tuple[str, str]) -> _Measured:
    _remove(output)
    start = time.perf_counter()
    process = _start(code, photos, output, where)
    cpu: dict[int, float] = {}
    memory = 0.0
    while process.poll() is None:
        pids = _below(process.pid)
        cpu.update({pid: seconds for pid in pids if (seconds := _cpu_seconds(pid)) is not None})
        memory = max(memory, sum(map(_megabytes, pids)))
        time.sleep(0.1)
    if process.returncode != 0:
        raise SystemExit(f"it failed: {code}")
    return _Measured(time.perf_counter() - start, sum(cpu.values()), memory)


def _killed(code: str, photos: Path, output: Path, where: tuple[str, str], after: float) -> str:
    _remove(output)
    process = _start(code, photos, output, where)
    time.sleep(after)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    ways = {"featx.extract": "goes on", "torchlens.extract_dataset": "goes on if told to"}
    then = next((then for call, then in ways.items() if call in code), "starts again")
    return f"{_rows(output)} rows, {then}"


def _remove(output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    output.with_suffix(".parquet").unlink(missing_ok=True)


def _rows(output: Path) -> int:
    import pyarrow.parquet as parquet

    files = [*output.glob("**/*.parquet"), *output.parent.glob(f"{output.name}.parquet")]
    count = 0
    for file in files:
        if file.name.startswith(("_", ".")):
            continue
        try:
            count += parquet.read_metadata(file).num_rows
        except Exception:
            continue
    for file in output.glob("*.safetensors"):
        from safetensors import safe_open

        with safe_open(file, "pt") as tensors:
            count += max(tensors.get_slice(key).get_shape()[0] for key in tensors.keys())  # noqa: SIM118
    return count


def _below(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _cpu_seconds(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _megabytes(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("Pss:")), 0.0)


if __name__ == "__main__":
    main()
