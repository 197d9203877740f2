"""Jobs that several processes share: one for each device, and actors of Ray."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featx
from featx.bulk.jobs import engines
from featx.bulk.samples.loading import Samples, batches
from featx.bulk.samples.sources import find_source

from .conftest import Net, expected, make_photos, pixels
from .test_resume import parts, run


class Noting:
    """A transform that says which processes ran it."""

    def __init__(self, notes: Path) -> None:
        self.notes = str(notes)

    def __call__(self, image: Any) -> torch.Tensor:
        with open(self.notes, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.05)
        return pixels(image)

    def __repr__(self) -> str:
        return "Noting()"


@pytest.mark.slow
def test_one_process_for_each_device(net: Net, photos: Path, tmp_path: Path) -> None:
    noting = Noting(tmp_path / "notes.txt")
    alone = run(net, photos, tmp_path / "alone", transform=noting)
    (tmp_path / "notes.txt").unlink()
    shared = run(net, photos, tmp_path / "shared", transform=noting, device=["cpu", "cpu"])
    assert parts(tmp_path / "shared") == parts(tmp_path / "alone")
    assert featx.verify(tmp_path / "shared").is_complete
    own = {str(os.getpid())}
    assert len(set((tmp_path / "notes.txt").read_text().split()) - own) == 2
    assert torch.equal(shared.tensor("logits"), alone.tensor("logits"))


class Drawing(Noting):
    """A transform that draws random numbers of torch, Python and numpy too."""

    def __call__(self, image: Any) -> torch.Tensor:
        return super().__call__(image) + torch.rand(()) + random.random() + np.random.rand()


@pytest.mark.slow
def test_processes_of_devices_keep_those_that_read(net: Net, photos: Path, tmp_path: Path) -> None:
    drawing = Drawing(tmp_path / "notes.txt")
    run(net, photos, tmp_path / "alone", transform=drawing, workers=1)
    (tmp_path / "notes.txt").unlink()
    table = run(net, photos, tmp_path / "shared", transform=drawing, workers=1, device=["cpu", "cpu"])
    assert len(table.paths) == 4
    own = {str(os.getpid())}
    assert len(set((tmp_path / "notes.txt").read_text().split()) - own) == 2
    assert parts(tmp_path / "shared") == parts(tmp_path / "alone")


def test_shards_are_asked_for_when_there_is_time_to_read_them() -> None:
    asked: list[int] = []

    def plan() -> Iterator[list[int]]:
        for number in range(20):
            asked.append(number)
            yield [number]

    samples = Samples(find_source(torch.arange(20), None, has_load=True, output="out"), lambda item: item)
    found: list[int] = []
    for batch in batches(samples, plan(), workers=1, timeout=30):
        found += batch.groups[0][0]
        assert len(asked) <= len(found) + 3
    assert found == list(range(20))


@pytest.mark.slow
def test_a_disk_that_is_full_for_several_devices_leaves_no_file(net: Net, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "part-000000-of-000004.parquet").mkdir(parents=True)  # where a shard has to go
    transform = Noting(tmp_path / "notes.txt")
    with pytest.raises(featx.ExtractionError, match=r"cannot be written: .*part-000000"):
        run(net, photos, tmp_path / "out", transform=transform, device=["cpu", "cpu"])
    assert not [each for each in (tmp_path / "out").iterdir() if each.name.startswith(".tmp")]


class Dies:
    """A transform that takes its process with it, once."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)
        self.parent = os.getpid()

    def __call__(self, image: Any) -> torch.Tensor:
        if os.getpid() != self.parent and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return pixels(image)

    def __repr__(self) -> str:
        return "Dies()"


@pytest.mark.slow
def test_a_process_of_a_device_that_dies(net: Net, photos: Path, tmp_path: Path) -> None:
    transform = Dies(tmp_path / "mark")
    with pytest.raises(
        featx.ExtractionError, match=r"was lost\. Nothing that was finished is lost: start the job again"
    ):
        run(net, photos, tmp_path / "out", transform=transform, device=["cpu", "cpu"])
    table = run(net, photos, tmp_path / "out", transform=transform, device=["cpu", "cpu"])
    assert featx.verify(tmp_path / "out").is_complete
    assert torch.allclose(table.tensor("logits"), expected(net, photos, table.keys), atol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown engine": ({"engine": "spark"}, "engine may be 'ray', got 'spark'"),
    "actors without Ray": ({"actors": 2}, "actors and actor_options are those of engine='ray'"),
    "devices with Ray": ({"engine": "ray", "device": ["cuda:0"]}, "one device each"),
    "a GPU with Ray": ({"engine": "ray", "device": "cuda"}, "one device each"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_go_together(net: Net, photos: Path, tmp_path: Path, name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(featx.ArgumentTypeError, match=message):
        run(net, photos, tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("nonsense", "'nonsense' is none of torch's"),
        (["cpu", "cuda:99"], "'cuda:99' is not there; torch finds"),
        ("meta", "'meta' cannot be used here"),
        ("xpu", "'xpu' cannot be used here"),
    ],
)
def test_devices_that_are_not_there(net: Net, photos: Path, tmp_path: Path, device: Any, message: str) -> None:
    with pytest.raises(featx.ExtractionError, match=message):
        run(net, photos, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


# -- Ray -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Any:
    ray = pytest.importorskip("ray")
    # Actors have to find the modules of these tests.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80_000_000,
        runtime_env=environment,
    )
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_actors_write_the_same_files(cluster: Any, net: Net, photos: Path, tmp_path: Path) -> None:
    (photos / "bad.png").write_bytes(b"no image")
    run(net, photos, tmp_path / "alone")
    table = run(net, photos, tmp_path / "out", engine="ray", actors=2)
    assert parts(tmp_path / "out") == parts(tmp_path / "alone")
    assert [key for key, _ in table.errors] == ["bad.png"]
    assert featx.verify(tmp_path / "out").is_complete


@pytest.mark.slow
def test_the_shard_of_an_actor_that_dies_goes_to_another_one(
    cluster: Any, net: Net, photos: Path, tmp_path: Path
) -> None:
    table = run(net, photos, tmp_path / "out", engine="ray", actors=1, transform=Dies(tmp_path / "mark"))
    assert (tmp_path / "mark").exists()
    assert featx.verify(tmp_path / "out").is_complete
    assert torch.allclose(table.tensor("logits"), expected(net, photos, table.keys), atol=1e-6)


@pytest.mark.slow
def test_actors_for_which_there_is_no_room_get_no_shard(cluster: Any, net: Net, photos: Path, tmp_path: Path) -> None:
    options = {"num_cpus": 1}
    table = run(net, photos, tmp_path / "out", engine="ray", actors=3, actor_options=options)  # of two processors
    assert table.is_complete


@pytest.mark.slow
def test_a_cluster_without_what_actors_want_is_told(
    cluster: Any, net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_PATIENCE", 2.0)
    monkeypatch.setattr(engines, "_SAY_EVERY", 1.0)
    with pytest.raises(featx.ExtractionError, match=r"no actor of Ray has started: each one wants {'num_cpus': 64}"):
        run(net, photos, tmp_path / "out", engine="ray", actors=1, actor_options={"num_cpus": 64})


@pytest.mark.slow
def test_a_lambda_cannot_be_sent_to_several_devices(net: Net, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(featx.ExtractionError, match="have to be defined at the top of a file, and be no lambda"):
        run(net, photos, tmp_path / "out", transform=lambda image: pixels(image), device=["cpu", "cpu"])


@pytest.mark.slow
def test_errors_of_actors_are_those_of_the_job(cluster: Any, net: Net, photos: Path, tmp_path: Path) -> None:
    run(net, photos, tmp_path / "out")
    for each in (tmp_path / "out").glob("part-*"):
        each.unlink()
    (tmp_path / "out" / "part-000000-of-000004.parquet").mkdir()  # where a shard has to go
    with pytest.raises(featx.ExtractionError, match=r"cannot be written: .*part-000000"):
        run(net, photos, tmp_path / "out", engine="ray", actors=1)


_DRIVER = """
import sys, time, torch, featx
sys.path.insert(0, sys.argv[1])
from tests.bulk.conftest import make_net, pixels
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
print("started", flush=True)
def slow(image):
    time.sleep(0.1)
    return pixels(image)
featx.extract(make_net(), {"fc": "logits"}, sys.argv[2], sys.argv[3], transform=slow, workers=0, batch_size=2,
              rows_per_shard=5, progress=False, engine="ray", actors=2)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("victim", ["driver", "raylet"])
def test_a_cluster_that_is_killed(tmp_path: Path, victim: str) -> None:
    pytest.importorskip("ray")
    make_photos(tmp_path / "photos", 40)
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", _DRIVER, root, str(tmp_path / "photos"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": root}
    before = _raylets()
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"started\n"
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("part-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = driver.pid if victim == "driver" else next(iter(_raylets() - before))
    os.kill(pid, signal.SIGKILL)
    patience = threading.Timer(90, driver.kill)
    patience.start()
    driver.wait()
    patience.cancel()
    driver.stdout.close()
    assert featx.open_features(tmp_path / "out").paths  # actors live on for a while, and may write what is left
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert featx.verify(tmp_path / "out").is_complete


def _raylets() -> set[int]:
    found = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 1) for line in found.splitlines()[1:]]
    return {int(pid) for pid, text in rows if "raylet/raylet" in text.split()[0]}
