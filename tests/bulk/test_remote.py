"""Results in an object store: a server that speaks S3, and fsspec's store in memory."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import featx
from featx.bulk.samples.sources import find_source
from featx.bulk.storage.remote import open_folder

from .conftest import Net, expected, make_photos
from .test_resume import run

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory() -> Any:
    files = fsspec.filesystem("memory")
    yield "memory://bucket/features"
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.mark.slow
def test_the_same_features_as_on_a_disk(net: Net, photos: Path, tmp_path: Path, memory: str) -> None:
    (photos / "bad.png").write_bytes(b"no image")
    for kind, nodes in (("parquet", {"fc": "logits"}), ("arrow", {"conv": "map"})):
        local = run(net, photos, tmp_path / kind, nodes)
        remote = run(net, photos, f"{memory}-{kind}", nodes)
        name = next(iter(nodes.values()))
        assert remote.keys == local.keys
        assert torch.equal(remote.tensor(name), local.tensor(name))
        assert torch.equal(remote[3][name], local[3][name])
        assert remote.errors == local.errors
        assert featx.verify(f"{memory}-{kind}").is_complete
        place = open_folder(f"{memory}-{kind}")
        parts = [each for each in place.names() if each.startswith("part-")]
        assert all(place.read(each) == (tmp_path / kind / each).read_bytes() for each in parts)


@pytest.mark.slow
def test_a_job_goes_on_and_others_are_refused(net: Net, photos: Path, memory: str) -> None:
    run(net, photos, memory)
    place: Any = open_folder(memory)
    lost = sorted(name for name in place.names() if name.startswith("part-"))[1]
    place._files.rm(place._inside(lost))
    assert not featx.verify(memory).is_complete
    run(net, photos, memory)
    assert featx.verify(memory).is_complete
    with pytest.raises(featx.ExtractionError, match="has the features of another job: its nodes"):
        run(net, photos, memory, {"conv": "logits"})


def test_a_store_that_refuses_a_file_is_told_with_its_url(
    net: Net, photos: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClientError(Exception):
        """Such as botocore's, which are no OSError."""

    def refuse(*_: object, **__: object) -> None:
        raise ClientError("SlowDown")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "put_file", refuse)
    with pytest.raises(featx.ExtractionError, match=r"'memory://.*' cannot be written: ClientError: SlowDown"):
        run(net, photos, memory)
    monkeypatch.undo()
    assert run(net, photos, memory).is_complete


@pytest.mark.parametrize("several", [False, True])
def test_tars_at_urls(net: Net, photos: Path, tmp_path: Path, memory: str, several: bool) -> None:
    files = fsspec.filesystem("memory")
    keys = [each.relative_to(photos).as_posix() for each in sorted(photos.rglob("*.png"))]
    with files.open("/bucket/a.tar", "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for key in keys:
            tar.add(photos / key, key)
    files.pipe_file("/bucket/b.tar", files.cat_file("/bucket/a.tar"))
    source = ["memory://bucket/a.tar", "memory://bucket/b.tar"] if several else "memory://bucket/a.tar"
    table = run(net, source, tmp_path / "out")
    assert table.keys == ([f"{name}/{key}" for name in "ab" for key in keys] if several else keys)
    assert torch.allclose(table.tensor("logits")[: len(keys)], expected(net, photos, keys), atol=1e-6)


@pytest.mark.parametrize("kind", ["folder", "parquet", "csv", "txt"])
def test_sources_at_urls(net: Net, photos: Path, tmp_path: Path, memory: str, kind: str) -> None:
    pandas: Any = pytest.importorskip("pandas")
    files = fsspec.filesystem("memory")
    keys = [each.relative_to(photos).as_posix() for each in sorted(photos.rglob("*.png"))]
    for key in keys:
        files.pipe_file(f"/bucket/photos/{key}", (photos / key).read_bytes())
    source = f"memory://bucket/photos/list.{kind}"
    if kind == "folder":
        files.pipe_file("/bucket/photos/notes.md", b"no image")
        source = "memory://bucket/photos/"
    elif kind == "txt":
        files.pipe_file("/bucket/photos/list.txt", "\n".join(keys).encode())
    else:
        with files.open(f"/bucket/photos/list.{kind}", "wb") as file:
            getattr(pandas.DataFrame({"path": keys, "label": 0}), f"to_{kind}")(file)
    table = run(net, source, tmp_path / "out")
    assert table.keys == keys
    assert torch.allclose(table.tensor("logits"), expected(net, photos, keys), atol=1e-6)


def test_a_source_that_is_not_there(net: Net, tmp_path: Path, memory: str) -> None:
    with pytest.raises(featx.ExtractionError, match=r"bucket/none\.parquet' cannot be read: FileNotFoundError"):
        run(net, "memory://bucket/none.parquet", tmp_path / "out")
    with pytest.raises(featx.ExtractionError, match="nothing to extract in the folder 'memory://bucket/none'"):
        run(net, "memory://bucket/none", tmp_path / "out")


def test_names_with_spaces_at_urls(net: Net, photos: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/my photos"
    shutil.copytree(photos, tmp_path / "my photos")
    first = sorted(photos.rglob("*.png"))[0]
    shutil.copy(first, tmp_path / "my photos" / "of a cat.png")
    tables = [run(net, source, tmp_path / str(number)) for number, source in enumerate([url, f"{url}/**/*.png"])]
    assert tables[0].keys == tables[1].keys
    assert "of a cat.png" in tables[0].keys
    assert [table.errors for table in tables] == [[], []]
    listed = run(net, [f"{url}/of a cat.png"], tmp_path / "listed")
    key = first.relative_to(photos).as_posix()
    assert torch.allclose(listed.tensor("logits"), expected(net, photos, [key]), atol=1e-6)


@pytest.mark.parametrize("pattern", ["memory://*/more/0*.png", "memory://{bucket,none}/more/0*.png"])
def test_a_pattern_that_begins_with_the_bucket(
    pattern: str, net: Net, photos: Path, tmp_path: Path, memory: str
) -> None:
    first = sorted(photos.rglob("*.png"))[0]
    fsspec.filesystem("memory").put_file(str(first), "/bucket/more/01.png")
    table = run(net, pattern, tmp_path / "out")
    assert table.keys == ["bucket/more/01.png"]
    key = first.relative_to(photos).as_posix()
    assert torch.allclose(table.tensor("logits"), expected(net, photos, [key]), atol=1e-6)


def test_a_folder_with_the_name_of_an_image(photos: Path, memory: str) -> None:
    fsspec.filesystem("memory").put_file(str(sorted(photos.rglob("*.png"))[0]), "/bucket/folder.png/1.png")
    assert find_source("memory://bucket/folder.png").keys == ["1.png"]


def test_a_server_that_sends_no_parts_of_files(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    first = sorted(photos.rglob("*.png"))[0]
    with tarfile.open(photos.parent / "all.tar", "w") as tar:
        tar.add(first, "1.png")
    monkeypatch.chdir(photos.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        source = find_source(f"http://127.0.0.1:{web.server_port}/all.tar")
        signed = f"http://127.0.0.1:{web.server_port}/photos/{first.relative_to(photos).as_posix()}?signature=1"
        assert find_source(signed).keys == [signed]
        assert find_source(signed).item(0).read() == first.read_bytes()
        with pytest.raises(featx.ExtractionError, match="its server does not send parts of files; copy the tar"):
            source.item(0)
        web.shutdown()


def test_a_url_of_one_image(net: Net, photos: Path, tmp_path: Path, memory: str) -> None:
    first = sorted(photos.rglob("*.png"))[0]
    fsspec.filesystem("memory").put_file(str(first), "/bucket/one.png")
    table = run(net, "memory://bucket/one.png", tmp_path / "out")
    assert table.keys == ["memory://bucket/one.png"]
    key = first.relative_to(photos).as_posix()
    assert torch.allclose(table.tensor("logits"), expected(net, photos, [key]), atol=1e-6)


def test_a_file_is_made_once(memory: str) -> None:
    place = open_folder(memory)
    assert place.create("_job.json", b"first")
    assert not place.create("_job.json", b"second")
    assert place.read("_job.json") == b"first"


def test_urls_that_cannot_be_reached() -> None:
    with pytest.raises(
        featx.ExtractionError, match=r"'unheard://of/a\.tar' cannot be read as a tar file: Protocol not"
    ):
        find_source("unheard://of/a.tar")
    with pytest.raises(featx.ExtractionError, match="'unheard://of' cannot be reached: ValueError: Protocol not known"):
        open_folder("unheard://of")


# -- S3 ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Any:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    started = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    started.start()
    host, port = started.get_host_and_port()
    keys["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    started.stop()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_s3_takes_inputs_and_results(server: str, net: Net, photos: Path, tmp_path: Path, workers: int) -> None:
    files = fsspec.filesystem("s3")
    keys = [each.relative_to(photos).as_posix() for each in sorted(photos.rglob("*.png"))]
    for key in keys:
        files.put_file(str(photos / key), f"bucket/photos/{key}")
    urls = [f"{server}/photos/{key}" for key in keys]
    output = f"{server}/features-{workers}"
    table = run(net, [*urls, f"{server}/photos/none.png"], output, workers=workers, timeout=30)
    assert table.keys == urls
    assert torch.allclose(table.tensor("logits"), expected(net, photos, keys), atol=1e-6)
    assert [key for key, _ in table.errors] == [f"{server}/photos/none.png"]
    assert featx.verify(output).is_complete


@pytest.mark.parametrize("url", ["s3://", "memory://", "file:///", "s3:///"])
def test_a_url_without_a_bucket_is_no_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        featx.ExtractionError, match=rf"'{url}' names no folder; give one, such as '\w+://bucket/features'"
    ):
        open_folder(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_bucket_that_is_not_there(server: str, net: Net, photos: Path, tmp_path: Path) -> None:
    words = "FileNotFoundError: .*bucket does not exist; check the address"
    with pytest.raises(featx.ExtractionError, match=rf"'s3://none/features' cannot be written: {words}"):
        run(net, photos, "s3://none/features")
    with pytest.raises(featx.ExtractionError, match=r"no file fits the pattern 's3://none/\*\.png'"):
        run(net, "s3://none/*.png", tmp_path / "out")
    with pytest.raises(featx.ExtractionError, match=rf"'s3://none/photos' cannot be read: {words}"):
        run(net, "s3://none/photos", tmp_path / "out")


@pytest.mark.slow
def test_a_pattern_of_urls(server: str, net: Net, photos: Path, tmp_path: Path) -> None:
    files = fsspec.filesystem("s3")
    keys = [each.relative_to(photos).as_posix() for each in sorted(photos.rglob("*.png"))]
    for key in keys:
        files.put_file(str(photos / key), f"bucket/pattern/{key}")
    table = run(net, f"{server}/pattern/**/*.png", tmp_path / "out")
    assert table.keys == keys
    assert torch.allclose(table.tensor("logits"), expected(net, photos, keys), atol=1e-6)


_JOB = """
import sys, time, featx
sys.path.insert(0, sys.argv[1])
from tests.bulk.conftest import make_net, pixels
def slow(image):
    time.sleep(0.02)
    return pixels(image)
featx.extract(make_net(), {"fc": "logits"}, sys.argv[2], sys.argv[3], transform=slow, workers=0, batch_size=2,
              rows_per_shard=5, progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3])
def test_a_kill_of_a_job_that_writes_to_s3(server: str, tmp_path: Path, after: int) -> None:
    make_photos(tmp_path / "photos", 40)
    output = f"{server}/killed-{after}"
    place = open_folder(output)
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", _JOB, root, str(tmp_path / "photos"), output]
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 60
    while sum(name.startswith("part-") for name in place.names()) < after:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not featx.open_features(output).is_complete
    subprocess.run(command, env=environment, check=True)
    assert featx.verify(output).is_complete
    assert len(featx.open_features(output)) == 40
