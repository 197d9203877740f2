"""Writes that fail, threads that read, and folders that two jobs want: no shard is finished that is not whole."""

from __future__ import annotations

import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import featx
from featx.bulk.jobs import job, shards
from featx.bulk.storage import formats

from .conftest import Net, expected, make_photos, pixels


def run(net: nn.Module, source: Any, output: Path, **options: Any) -> Any:
    options = {"transform": pixels, "workers": 0, "progress": False, "batch_size": 4, "rows_per_shard": 20, **options}
    return featx.extract(net, {"fc": "y"}, source, output, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("failing", [2, 3, 5])
def test_shard_with_a_write_that_failed_is_not_published(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, failing: int
) -> None:
    photos, output = tmp_path / "photos", tmp_path / "features"
    keys = make_photos(photos, 20)
    writer = {"parquet": formats._ParquetFile, "arrow": formats._ArrowFile}[kind]
    write, count = writer.write, [0]

    def fail(self: Any, batch: Any) -> None:
        count[0] += 1
        time.sleep(0.3 if count[0] == 1 else 0)  # the model's process is ahead by then
        if count[0] == failing:
            raise OSError(28, "No space left on device")
        write(self, batch)

    monkeypatch.setattr(formats, "_ROWS_OF_PARQUET", 4)
    monkeypatch.setattr(formats, "_ROWS_OF_ARROW", 4)
    monkeypatch.setattr(writer, "write", fail)
    with pytest.raises(featx.ExtractionError, match="is full"):
        run(net, photos, output, format=kind)
    assert not [path for path in output.iterdir() if path.name.startswith("part")]
    monkeypatch.setattr(writer, "write", write)
    table = run(net, photos, output, format=kind)
    assert torch.allclose(table.tensor("y"), expected(net, photos, keys), atol=1e-6)
    assert featx.verify(output).is_complete


def _full(path: Any, *_: object) -> None:
    Path(path).touch()
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("place", ["job file", "key list", "first shard", "second shard"])
def test_a_disk_that_is_full_when_a_file_is_opened_is_told(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, place: str
) -> None:
    photos, output = tmp_path / "photos", tmp_path / "features"
    keys = make_photos(photos, 20)
    files = formats.open_writer
    opened: list[Path] = []

    def open_writer(path: Path, *args: Any) -> Any:
        opened.append(path)
        return _full(path) if place in ("first shard", "second shard")[: len(opened)] else files(path, *args)

    def write_table(_: object, path: Path) -> None:
        _full(path)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "open_writer", open_writer)
        if place == "job file":
            patch.setattr(Path, "write_bytes", _full)
        if place == "key list":
            patch.setattr("pyarrow.parquet.write_table", write_table)
        with pytest.raises(
            featx.ExtractionError, match=r"features' cannot be written: the disk is full.*start the job"
        ):
            run(net, photos, output, format=kind, rows_per_shard=10)
    assert not [path for path in output.iterdir() if path.name.startswith(".tmp")]
    table = run(net, photos, output, format=kind, rows_per_shard=10)
    assert torch.allclose(table.tensor("y"), expected(net, photos, keys), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("earlier", [False, True])
def test_write_that_fails_while_the_shard_waits_to_be_finished_leaves_no_file(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, earlier: bool
) -> None:
    photos, output = tmp_path / "photos", tmp_path / "features"
    keys = make_photos(photos, 12)
    if earlier:  # rows of an earlier file are written when the shard is finished
        (photos / keys[0]).rename(tmp_path / "photo")
        (photos / keys[0]).touch()
        run(net, photos, output, format=kind)
        (tmp_path / "photo").replace(photos / keys[0])

    def fail(*_: Any) -> None:
        time.sleep(0.2)  # the model's process waits for the end by then
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(formats._Writer, "add", fail)
        with pytest.raises(featx.ExtractionError, match="is full"):
            run(net, photos, output, format=kind, retry=earlier)
    assert not [path for path in output.iterdir() if path.name.startswith(".tmp")]
    table = run(net, photos, output, format=kind, retry=earlier)
    assert torch.allclose(table.tensor("y"), expected(net, photos, keys), atol=1e-6)


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


def test_threads_read_the_rows_that_they_ask_for(tmp_path: Path) -> None:
    table = featx.extract(
        nn.Identity(), {"output": "y"}, Numbers(), tmp_path / "features", load=lambda x: x, workers=0, batch_size=10,
        rows_per_shard=10, progress=False,
    )  # fmt: skip
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(table.__getitem__, torch.randperm(200).tolist() * 5))
    assert all(torch.equal(row["y"], torch.full((8,), float(row["key"]))) for row in rows)


def test_job_that_is_refused_leaves_the_keys_of_the_other_one(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, others, output = tmp_path / "photos", tmp_path / "others", tmp_path / "features"
    make_photos(photos, 12)
    make_photos(others, 10)
    reach = job.reach

    def start_another(place: str) -> None:
        if place == "before the job file":
            monkeypatch.setattr(job, "reach", reach)
            run(net, photos, output)
        reach(place)

    monkeypatch.setattr(job, "reach", start_another)
    with pytest.raises(featx.ExtractionError, match="has the features of other samples"):
        run(net, others, output)
    assert featx.verify(output).is_complete


def test_list_of_keys_of_another_job_is_told(net: Net, tmp_path: Path) -> None:
    photos, output = tmp_path / "photos", tmp_path / "features"
    make_photos(photos, 4)
    run(net, photos, output)
    job.write_keys(featx.bulk.storage.remote.open_folder(output), ["a", "b"])
    assert "is not the list of keys of this job" in str(featx.verify(output))


def test_what_cannot_be_done_is_refused_by_name(net: Net, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    keys = make_photos(photos, 4)
    with pytest.raises(featx.ExtractionError, match="is a file, and features go to a folder"):
        run(net, photos, photos / keys[0])
    with pytest.raises(featx.FeatxError, match="samples need numbers or paths"):
        run(net, iter([torch.rand(3)]), tmp_path / "features")
    with pytest.raises(featx.FeatxError, match=r"give loader\.dataset"):
        run(net, torch.utils.data.DataLoader(Numbers()), tmp_path / "features")
    with pytest.raises(featx.FeatxError, match="'y' has no elements"):
        featx.extract(
            nn.Identity(), {"output": "y"}, Numbers(), tmp_path / "features", load=lambda x: x[:0], workers=0,
            progress=False,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("bad", [None, "text", {"x": None}, [object()]])
def test_sample_of_which_no_batch_can_be_made_fails_alone(net: Net, tmp_path: Path, bad: Any, workers: int) -> None:
    photos = tmp_path / "photos"
    keys = make_photos(photos, 8)

    def load(path: Any) -> Any:
        return bad if str(path).endswith(keys[3]) else pixels(Image.open(path)).numpy()

    table = run(net, photos, tmp_path / "features", load=load, transform=None, workers=workers)
    assert [key for key, _ in table.errors] == [keys[3]]
    rest = [key for key in keys if key != keys[3]]
    assert torch.allclose(table.tensor("y"), expected(net, photos, rest), atol=1e-6)


@pytest.mark.parametrize("option", [{"rows_per_shard": -5}, {"batch_size": 0}, {"workers": -1}, {"format": "csv"}])
def test_numbers_and_formats_that_make_no_sense_are_refused(net: Net, tmp_path: Path, option: dict[str, Any]) -> None:
    make_photos(tmp_path / "photos", 2)
    with pytest.raises(featx.FeatxError, match=f"{next(iter(option))} must be"):
        run(net, tmp_path / "photos", tmp_path / "features", **option)


@pytest.mark.slow
def test_processor_of_transformers_is_found(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    photos, folder = tmp_path / "photos", tmp_path / "vit"
    keys = make_photos(photos, 3)
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=16
    )
    transformers.ViTModel(config).save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(folder)
    model = transformers.ViTModel.from_pretrained(folder).eval()
    table = featx.extract(
        model, {"layernorm": featx.Feature("y", pool="cls")}, photos, tmp_path / "features", workers=0, progress=False
    )
    images = [Image.open(photos / key).convert("RGB") for key in keys]
    with torch.no_grad():
        expected = model(processor(images, return_tensors="pt")["pixel_values"]).last_hidden_state[:, 0]
    assert torch.allclose(table.tensor("y"), expected, atol=1e-5)


@pytest.mark.parametrize("damage", ["a changed header", "cut between members", "cut in a header"])
def test_tar_that_is_damaged_is_refused(net: Net, tmp_path: Path, damage: str) -> None:
    photos = tmp_path / "photos"
    keys = make_photos(photos, 6)
    path = tmp_path / "all.tar"
    with tarfile.open(path, "w") as tar:
        for key in keys:
            tar.add(photos / key, key)
    with tarfile.open(path) as tar:
        places = [member.offset for member in tar]
    data = bytearray(path.read_bytes())
    if damage == "a changed header":
        data[places[3] + 150] ^= 1  # in its checksum
    end = {"cut between members": places[3], "cut in a header": places[3] + 100}.get(damage, len(data))
    path.write_bytes(data[:end])
    with pytest.raises(featx.ExtractionError, match=f"damaged or cut off at byte {places[3]}, after 3 files"):
        run(net, path, tmp_path / "features")


def test_hard_links_in_a_tar_are_images(net: Net, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    keys = make_photos(photos, 2)
    (photos / "link.png").hardlink_to(photos / keys[0])
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for key in [*keys, "link.png"]:
            tar.add(photos / key, key)
    table = run(net, tmp_path / "all.tar", tmp_path / "features")
    assert table.keys == [*keys, "link.png"]
    assert torch.equal(table.get("link.png")["y"], table.get(keys[0])["y"])
