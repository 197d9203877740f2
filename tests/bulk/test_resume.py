"""A job that is killed, at whatever moment, goes on with no row lost or doubled, and gives the same bytes."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import featx
from featx import Feature
from featx.bulk.jobs.compute import Runner
from featx.bulk.storage.failpoints import PLACES, VARIABLE
from featx.bulk.storage.folder import LocalFolder

from .conftest import Net, expected, make_net, pixels

# Children have all modules of this process already; it has no threads of its own that hold locks.
_PROCESSES = multiprocessing.get_context("fork")


def run(net: nn.Module, photos: Any, output: Path, nodes: Any = None, **options: Any) -> featx.FeatureTable:
    options = {"transform": pixels, "workers": 0, "batch_size": 2, "rows_per_shard": 5, "progress": False, **options}
    return featx.extract(net, nodes or {"fc": "logits"}, photos, output, **options)


def job(photos: Path, output: Path, kind: str = "parquet", failpoint: str = "", workers: int = 0) -> None:
    """What runs in a process that is killed."""
    torch.set_num_threads(1)
    os.environ[VARIABLE] = failpoint
    nodes = {"conv": "map"} if kind == "arrow" else {"fc": "logits"}
    run(make_net(), photos, output, nodes, workers=workers)


def child(*args: Any) -> Any:
    """Start a job in a process of its own."""
    process = _PROCESSES.Process(target=job, args=args)
    process.start()
    return process


def parts(folder: Path) -> dict[str, bytes]:
    """The bytes of the files that a job has published, but for the job file, which says when and where it ran."""
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir()) if each.name.startswith("part-")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, bytes]]]:
    """Photos, one of which cannot be read, and the files of jobs that nothing has disturbed, by format."""
    from .conftest import make_photos

    folder = tmp_path_factory.mktemp("whole")
    make_photos(folder / "photos", 20)
    (folder / "photos" / "bad.png").write_bytes(b"")
    files: dict[str, dict[str, bytes]] = {}
    for kind, nodes in (("parquet", {"fc": "logits"}), ("arrow", {"conv": "map"})):
        run(make_net(), folder / "photos", folder / kind, nodes)
        files[kind] = parts(folder / kind)
    return folder / "photos", files


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_every_place(whole: Any, tmp_path: Path, place: str, kind: str) -> None:
    photos, files = whole
    is_once = "list" in place or "job" in place
    for time_of_kill in (1,) if is_once else (1, 3):
        output = tmp_path / str(time_of_kill)
        process = child(photos, output, kind, f"{place}:{time_of_kill}")
        process.join()
        assert process.exitcode == -signal.SIGKILL
        again = child(photos, output, kind)
        again.join()
        assert again.exitcode == 0
        assert parts(output) == files[kind]
        assert featx.verify(output).is_complete


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_kills_at_random_moments(whole: Any, tmp_path: Path, workers: int) -> None:
    photos, files = whole
    draw = random.Random(workers)
    start = time.perf_counter()
    child(photos, tmp_path / "first", "parquet", "", workers).join()
    longest = time.perf_counter() - start
    output, kills = tmp_path / "out", 0
    for _ in range(10):
        process = child(photos, output, "parquet", "", workers)
        process.join(longest * draw.uniform(0.02, 0.8))
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills
    last = child(photos, output, "parquet", "", workers)
    last.join()
    assert last.exitcode == 0
    assert parts(output) == files["parquet"]
    assert featx.verify(output).is_complete


@pytest.mark.slow
def test_two_jobs_in_one_folder_at_once(whole: Any, tmp_path: Path) -> None:
    photos, files = whole
    both = [child(photos, tmp_path / "out") for _ in range(2)]
    for process in both:
        process.join()
        assert process.exitcode == 0
    assert parts(tmp_path / "out") == files["parquet"]


def test_finished_shards_are_not_computed_again(net: Net, photos: Path, tmp_path: Path) -> None:
    table = run(net, photos, tmp_path / "out")
    for path in table.paths[1:3]:
        Path(path).unlink()
    before = {path: os.stat(path).st_mtime_ns for path in table.paths if Path(path).exists()}
    assert len(featx.open_features(tmp_path / "out").missing) == 2
    again = run(net, photos, tmp_path / "out", batch_size=7)
    assert again.is_complete
    assert {path: os.stat(path).st_mtime_ns for path in before} == before
    torch.testing.assert_close(again.tensor("logits"), table.tensor("logits"))


@pytest.mark.parametrize("size", [2, 3])
def test_a_job_that_goes_on_may_have_a_smaller_batch(
    net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    table = run(net, photos, tmp_path / "out", batch_size=5)
    Path(table.paths[0]).unlink()
    sizes: list[int] = []
    compute = Runner.compute

    def noted(runner: Runner, numbers: Any, batch: Any) -> Any:
        sizes.append(len(batch))
        return compute(runner, numbers, batch)

    monkeypatch.setattr(Runner, "compute", noted)
    assert run(net, photos, tmp_path / "out", batch_size=size).is_complete
    assert max(sizes) == size


def test_nothing_is_timed_when_a_job_goes_on(
    net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = run(net, photos, tmp_path / "out", batch_size=None).job.recorded["batch_size"]

    def timed(*args: Any) -> float:
        raise AssertionError("the job says how large its batches are")

    monkeypatch.setattr("featx.bulk.jobs.batch_size.seconds_of_sample", timed)
    next((tmp_path / "out").glob("part-*")).unlink()
    table = run(net, photos, tmp_path / "out", batch_size=None)
    assert table.is_complete
    assert table.job.recorded["batch_size"] == size


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("left", [0, 10, -1, -40])
def test_a_truncated_shard_is_found_and_done_again(
    net: Net, photos: Path, tmp_path: Path, left: int, kind: str
) -> None:
    table = run(net, photos, tmp_path / "out", format=kind)
    path = Path(table.paths[1])
    data = path.read_bytes()
    path.write_bytes(data[:left])
    found = featx.verify(tmp_path / "out")
    assert not found.is_complete
    assert f"{path.name} is not whole; run the job again" in str(found)
    assert run(net, photos, tmp_path / "out", format=kind).is_complete
    assert path.read_bytes() == data


def test_a_changed_byte_is_found_by_verify(net: Net, photos: Path, tmp_path: Path) -> None:
    table = run(net, photos, tmp_path / "out", rows_per_shard=20)
    path = Path(table.paths[0])
    data = bytearray(path.read_bytes())
    place = data.find(table.tensor("logits")[4].numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert "cannot be read" in str(featx.verify(tmp_path / "out"))


OTHER_JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "nodes": ({"nodes": {"fc": "scores"}}, "its nodes is"),
    "what is done to them": ({"nodes": {"fc": Feature("logits", dtype=torch.float16)}}, "its code is"),
    "transform": ({"transform": lambda image: pixels(image) * 2}, "its transform is"),
    "rows of a shard": ({"rows_per_shard": 7}, "its rows_per_shard is '5', and here it is '7'"),
    "format": ({"format": "arrow"}, "its format is 'parquet', and here it is 'arrow'"),
}


@pytest.mark.parametrize("name", OTHER_JOBS)
def test_another_job_is_refused(net: Net, photos: Path, tmp_path: Path, name: str) -> None:
    run(net, photos, tmp_path / "out")
    before = parts(tmp_path / "out")
    options, message = OTHER_JOBS[name]
    with pytest.raises(featx.ExtractionError, match=message):
        run(net, photos, tmp_path / "out", **options)
    assert parts(tmp_path / "out") == before


def test_other_weights_are_refused(net: Net, photos: Path, tmp_path: Path) -> None:
    run(net, photos, tmp_path / "out")
    with torch.no_grad():
        net.fc.bias[0] += 1e-3
    with pytest.raises(featx.ExtractionError, match="its weights is"):
        run(net, photos, tmp_path / "out")


def test_other_samples_are_refused(net: Net, photos: Path, tmp_path: Path) -> None:
    run(net, photos, tmp_path / "out")
    Image.new("RGB", (20, 20)).save(photos / "zzz.png")
    with pytest.raises(
        featx.ExtractionError,
        match=r"of other samples: it has \d+, and here are \d+; all that both",
    ):
        run(net, photos, tmp_path / "out")


def test_a_job_that_does_not_fit_is_refused_before_it_starts(
    net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFolder, "free_bytes", lambda self: 100)
    with pytest.raises(featx.ExtractionError, match=r"take 400 B, and the disk of .* has 100 B; pool them"):
        run(net, photos, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_what_was_finished(
    net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, done = LocalFolder.publish, list[str]()

    def full(self: LocalFolder, temporary: Path, name: str) -> None:
        if len(done) == 3:
            raise OSError(28, "No space left on device")
        done.append(name)
        publish(self, temporary, name)

    monkeypatch.setattr(LocalFolder, "publish", full)
    with pytest.raises(featx.ExtractionError, match=r"is full. Nothing that was finished is lost: make room"):
        run(net, photos, tmp_path / "out")
    monkeypatch.undo()
    assert len(parts(tmp_path / "out")) == 2  # and the list of keys
    assert run(net, photos, tmp_path / "out").is_complete
    assert LocalFolder(tmp_path / "out").unfinished() == []


@pytest.mark.slow
def test_an_interrupt_leaves_a_state_that_goes_on(
    net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from featx.bulk.jobs.compute import Runner

    compute, calls = Runner.compute, list[int]()

    def interrupted(self: Runner, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return compute(self, *args)

    monkeypatch.setattr(Runner, "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(net, photos, tmp_path / "out")
    monkeypatch.undo()
    assert LocalFolder(tmp_path / "out").unfinished() == []
    assert run(net, photos, tmp_path / "out").is_complete


@pytest.mark.slow
def test_a_reading_process_that_dies_gives_an_error_and_no_hang(net: Net, photos: Path, tmp_path: Path) -> None:
    run(net, photos, tmp_path / "other")  # the example is read in this process

    def deadly(image: Any) -> torch.Tensor:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return pixels(image)

    with pytest.raises(featx.ExtractionError, match=r"samples was lost or hangs, at .*start the job again"):
        run(net, photos, tmp_path / "out", transform=deadly, workers=1)


@pytest.mark.slow
def test_ranks_share_the_shards(net: Net, photos: Path, tmp_path: Path) -> None:
    first = run(net, photos, tmp_path / "out", rank=0, world_size=2)
    assert first.missing == [1, 3]
    assert run(net, photos, tmp_path / "out", rank=1, world_size=2).is_complete
    alone = run(net, photos, tmp_path / "alone")
    assert parts(tmp_path / "out") == parts(tmp_path / "alone")
    assert torch.equal(alone.tensor("logits"), featx.open_features(tmp_path / "out").tensor("logits"))
    with pytest.raises(featx.ArgumentTypeError, match="rank and world_size must be given together"):
        run(net, photos, tmp_path / "out", rank=1)


LAUNCHERS: dict[str, tuple[dict[str, str], tuple[int, int, str]]] = {
    "torchrun": ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8, "RANK")),
    "slurm": (
        {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "4"},
        (1, 4, "SLURM_ARRAY_TASK_ID"),
    ),
    "kubernetes": ({"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "6"}, (2, 6, "JOB_COMPLETION_INDEX")),
    "none": ({}, (0, 1, "")),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_say_the_share(launcher: str) -> None:
    from featx.bulk.jobs.ranks import share_of

    environment, share = LAUNCHERS[launcher]
    assert share_of(None, None, environment) == share
    assert share_of(1, 3, environment) == (1, 3, "")


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "0"},
        {"RANK": "abc", "WORLD_SIZE": "2"},
    ],
    ids=["an array with steps", "no number"],
)
def test_variables_that_say_no_share_are_named(environment: dict[str, str]) -> None:
    from featx.bulk.jobs.ranks import share_of

    with pytest.raises(featx.ArgumentTypeError, match=f"{next(iter(environment))}=.* do not say which of how many"):
        share_of(None, None, environment)


def test_a_share_that_a_launcher_says_is_told(
    net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in LAUNCHERS["slurm"][0].items():
        monkeypatch.setenv(name, value)
    run(net, photos, tmp_path / "out", progress=True)
    told = capsys.readouterr().err
    assert "process 1 of 4, as the environment variable SLURM_ARRAY_TASK_ID says; rank=0, world_size=1" in told


def test_a_job_for_which_the_disk_is_too_small_leaves_none(
    net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(LocalFolder, "free_bytes", lambda self: 10)
        with pytest.raises(featx.ExtractionError, match="or choose another disk"):
            run(net, photos, tmp_path / "out")
    assert run(net, photos, tmp_path / "out", {"fc": featx.Feature("logits", dtype=torch.float16)}).is_complete


def test_features_that_are_no_finite_numbers_are_counted(
    net: Net, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = {"fc": featx.Feature("logits", apply=_times_1e30, dtype=torch.float16)}
    table = run(net, photos, tmp_path / "out", large, progress=True)
    count = int((~table.tensor("logits").isfinite()).any(1).sum())
    assert count > 0
    assert f"; {count} have features with NaN or infinity" in capsys.readouterr().err


def _times_1e30(value: torch.Tensor) -> torch.Tensor:
    return value * 1e30


def test_a_transform_that_draws_is_told(
    net: Net, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(net, photos, tmp_path / "out", transform=lambda image: pixels(image) + torch.rand(()), progress=True)
    assert "the transform gives another input each time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": "5"}, "timeout must be a number of seconds"),
        ({"rank": "0", "world_size": 2}, "must be given together, as in 0 of 8; got '0' of 2"),
        ({"rank": 2, "world_size": 2}, "with world_size=2 rank is a number from 0 to 1, got 2"),
    ],
)
def test_numbers_are_checked_first(
    net: Net, photos: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=message):
        run(net, photos, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_is_no_model_or_has_no_order_is_told(net: Net, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(featx.ArgumentTypeError, match=r"model must be an nn\.Module, got 'resnet18'"):
        run("resnet18", photos, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(featx.ArgumentTypeError, match=r"a set of samples has no order.*sorted"):
        run(net, set(map(str, photos.glob("*.png"))), tmp_path / "out")
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "a.mp4").write_bytes(b"")
    with pytest.raises(featx.ExtractionError, match=r"1 other files left out\); load=\.\.\., a function"):
        run(net, tmp_path / "videos", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_failures_are_tried_again(net: Net, photos: Path, tmp_path: Path, kind: str) -> None:
    good = (photos / "001.png").read_bytes()
    for name in ("001.png", "017.png"):
        (photos / name).write_bytes(b"")
    table = run(net, photos, tmp_path / "out", format=kind)
    assert [key for key, _ in table.errors] == ["001.png", "017.png"]
    (photos / "001.png").write_bytes(good)
    assert len(run(net, photos, tmp_path / "out", format=kind).errors) == 2  # not by itself
    again = run(net, photos, tmp_path / "out", format=kind, retry=True)
    assert [key for key, _ in again.errors] == ["017.png"]
    assert featx.verify(tmp_path / "out").is_complete
    torch.testing.assert_close(again.tensor("logits"), expected(net, photos, again.keys))


_LIMITED = """
import resource, sys, torch, featx
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(20), torch.nn.Flatten()).eval()
options = dict(transform=lambda image: torch.ones(3, 32, 32), workers=0, batch_size=4, progress=False)
def extract():
    return featx.extract(net, ["1"], sys.argv[1], sys.argv[2], **options)
try:
    extract()
except featx.ExtractionError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(extract().tensor("1").shape)
"""


@pytest.mark.slow
def test_folder_that_cannot_be_written_is_named_and_the_job_goes_on(photos: Path, tmp_path: Path) -> None:
    job = [sys.executable, "-c", _LIMITED, str(photos), str(tmp_path / "out")]
    found = subprocess.run(job, capture_output=True, text=True, timeout=100, check=False)
    message, *_, last = found.stdout.splitlines()
    assert re.search("/out' cannot be written: .*File too large. Nothing that was finished is lost", message)
    count = sum(each.is_file() for each in photos.rglob("*"))
    assert last == f"torch.Size([{count}, 1200])"


_FULL = """
import sys, torch, featx
class Large:
    def __call__(self, image):
        return torch.zeros(3, 1500, 1500)  # 27 MB
    def __repr__(self):
        return "Large()"
net = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
options = dict(transform=Large(), workers=2, batch_size=4, progress=False)
featx.extract(net, ["1"], sys.argv[1], sys.argv[2], **options)
"""


@pytest.mark.slow
def test_full_shared_memory_gives_an_error_and_no_hang(photos: Path, tmp_path: Path) -> None:
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=40m tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small /dev/shm")
    job = [*command, sys.executable, "-c", _FULL, str(photos), str(tmp_path / "out")]
    found = subprocess.run(job, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 1
    assert "ExtractionError: a batch does not fit into shared memory" in found.stderr
    assert "more shared memory (/dev/shm)" in found.stderr


def test_file_of_another_shard_counts_as_not_there(net: Net, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    table = run(net, photos, folder)
    keys = list(table.keys)
    first, second = sorted(folder.glob("part-*"))[:2]
    whole = second.read_bytes()
    assert first.read_bytes() != whole
    second.write_bytes(first.read_bytes())
    table = run(net, photos, folder)
    assert list(table.keys) == keys
    assert second.read_bytes() == whole


def test_rows_are_read_one_by_one(net: Net, photos: Path, tmp_path: Path) -> None:
    table = run(net, photos, tmp_path / "out")
    with pytest.raises(featx.ArgumentTypeError, match="rows are read one by one"):
        table[0:2]
