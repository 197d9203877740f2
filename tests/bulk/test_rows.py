"""Rows are those of their samples: no buffer of the model is shared, no other sample counts, and no chance."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import featx
from featx.bulk.samples.decode import decode_image
from featx.bulk.samples.loading import reason_of

from .conftest import Net, expected, make_photos, pixels


def run(model: nn.Module, source: Any, output: Path, **options: Any) -> featx.bulk.FeatureTable:
    options = {"transform": pixels, "batch_size": 4, "workers": 0, "progress": False, **options}
    return featx.extract(model, {"output": "y"}, source, output, **options)


class Static(nn.Module):
    """Returns the same memory in each call, as code for CUDA graphs does."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("out", torch.zeros(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out.copy_(self.net(x)) if len(x) == 4 else self.net(x)  # type: ignore[operator]


@pytest.mark.slow
def test_a_model_may_return_the_same_memory_each_time(net: Net, tmp_path: Path) -> None:
    keys = make_photos(tmp_path / "photos", 40)
    wrapped = nn.Sequential(Static(net)).eval()
    table = featx.extract(
        wrapped, {"0": "y"}, tmp_path / "photos", tmp_path / "out", transform=pixels, batch_size=4, rows_per_shard=20,
        workers=0, progress=False, check_rows=False,
    )  # fmt: skip
    assert table.keys == keys
    assert torch.allclose(table.tensor("y"), expected(net, tmp_path / "photos", keys), atol=1e-6)


class Centred(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - y.mean(0)


class Drawing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x))  # in eval mode too


class ByLargest(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / x.max())


DEPENDS, DRAWS = "depends on the other samples of a batch", "another one each time"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reason"), [(Centred, DEPENDS), (ByLargest, DEPENDS), (Drawing, DRAWS)])
def test_rows_that_are_not_those_of_samples_are_refused(kind: type[Net], reason: str, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 8)
    torch.manual_seed(0)
    model = kind().eval()
    with pytest.raises(featx.RequestError, match=f"{reason}.*check_rows=False"):
        run(model, tmp_path / "photos", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(run(model, tmp_path / "photos", tmp_path / "out", check_rows=False)) == 8


class AlongTheBatch(nn.Module):
    """Takes the batch for the length, because batch_first=True was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gru(x)[0]


class WithoutStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


VALUES = {
    "of any size": lambda: torch.rand(7, 5),
    "of 0 and 1": lambda: (torch.rand(7, 5) > 0.5).float(),
    "all 0": lambda: torch.zeros(7, 5),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("kind", [AlongTheBatch, WithoutStatistics])
def test_rows_that_depend_on_earlier_samples_or_on_samples_of_two_values_are_refused(
    kind: type[nn.Module], values: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    first = VALUES[values]()
    with pytest.raises(featx.RequestError, match=DEPENDS):
        run(kind().eval(), [first, torch.rand(7, 5), torch.rand(7, 5)], tmp_path / "out", transform=nn.Identity())


class Padded(nn.Module):
    """An encoder that packs its batch where the mask has its padding at the end."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(9, 8), nn.TransformerEncoder(layer, 1)

    def forward(self, ids: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(ids), src_key_padding_mask=pad).mean(1)


class CentredTokens(Padded):
    def forward(self, ids: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        found = self.embedding(ids).mean(1)
        return found - found.mean(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_texts_with_padding_are_taken_and_those_that_are_centred_are_not(tmp_path: Path) -> None:
    rows = [{"ids": torch.tensor([5, 3, 7, 0]), "pad": torch.tensor([False, False, False, True])}] * 3
    for model, is_taken in ((Padded().eval(), True), (CentredTokens().eval(), False)):
        options: dict[str, Any] = {"transform": None, "load": lambda row: row}
        if is_taken:
            assert len(run(model, rows, tmp_path / "taken", **options)) == 3
        else:
            with pytest.raises(featx.RequestError, match=DEPENDS):
                run(model, rows, tmp_path / "refused", **options)


def test_images_that_are_others_under_the_same_names_are_another_job(net: Net, tmp_path: Path) -> None:
    keys = make_photos(tmp_path / "photos", 20)
    run(net, tmp_path / "photos", tmp_path / "out", rows_per_shard=10, rank=0, world_size=2)
    for key in keys[1:]:
        Image.new("RGB", (20, 18), "red").save(tmp_path / "photos" / key)
    with pytest.raises(featx.ExtractionError, match="its sample is"):
        run(net, tmp_path / "photos", tmp_path / "out", rows_per_shard=10, rank=1, world_size=2)


def test_a_table_that_was_written_meanwhile_is_told(net: Net, tmp_path: Path) -> None:
    keys = make_photos(tmp_path / "photos", 12)
    broken = tmp_path / "photos" / keys[5]
    image = broken.read_bytes()
    broken.write_bytes(b"no image")
    table = run(net, tmp_path / "photos", tmp_path / "out", rows_per_shard=6)
    assert len(table) == 11
    broken.write_bytes(image)
    run(net, tmp_path / "photos", tmp_path / "out", rows_per_shard=6, retry=True)
    for read in (lambda: table.keys, lambda: table.tensor("y"), lambda: table[3]):
        with pytest.raises(featx.ExtractionError, match="has been written since it was opened"):
            read()
    again = featx.open_features(tmp_path / "out")
    assert again.keys == keys
    assert torch.allclose(again.tensor("y"), expected(net, tmp_path / "photos", keys), atol=1e-6)


@pytest.mark.parametrize("mark", [" (pid(s) 31683)", " (pid 7)", " (pid(s) 31683, 31690)", " at 0x7f26b4652340"])
def test_reasons_are_the_same_in_each_run(mark: str) -> None:
    assert reason_of(RuntimeError(f"a worker{mark} is\nkilled (9)")) == "RuntimeError: a worker is killed (9)"


class Poison:
    """Ends the process that reads one of the images."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, image: Any) -> torch.Tensor:
        if image.size == (41, 30):
            if self.how == "exits":
                os._exit(1)
            raise {"interrupt": KeyboardInterrupt, "base": BaseException}[self.how]
        return pixels(image)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exits", "interrupt", "base"])
def test_a_sample_that_ends_its_process_is_a_failure(how: str, net: Net, tmp_path: Path) -> None:
    keys = make_photos(tmp_path / "photos", 24)
    Image.new("RGB", (41, 30)).save(tmp_path / "photos" / keys[17])
    table = run(net, tmp_path / "photos", tmp_path / "out", transform=Poison(how), workers=2, rows_per_shard=8)
    assert [key for key, _ in table.errors] == [keys[17]]
    lost = "the process that read it was lost: DataLoader worker exited unexpectedly"  # without a number of the run
    assert table.errors[0][1] == lost
    others = [key for key in keys if key != keys[17]]
    assert table.keys == others
    assert torch.allclose(table.tensor("y"), expected(net, tmp_path / "photos", others), atol=1e-6)


@pytest.mark.slow
def test_random_numbers_of_the_user_are_not_drawn(net: Net, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 4)
    before = torch.get_rng_state()
    run(net, tmp_path / "photos", tmp_path / "out", workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_folders_that_are_linked_to_each_other(net: Net, tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (20, 18)).save(folder / f"{name}.png")
        (folder / "link").symlink_to(f"../{other}")
    table = run(net, tmp_path / "photos", tmp_path / "out")
    assert table.keys == ["a/a.png", "a/link/b.png", "b/b.png", "b/link/a.png"]


def test_tar_files_that_were_joined_by_cat(net: Net, tmp_path: Path) -> None:
    keys = make_photos(tmp_path / "photos", 4)
    parts: list[bytes] = []
    for key in keys:
        with tarfile.open(tmp_path / "one.tar", "w") as tar:
            tar.add(tmp_path / "photos" / key, key)
        parts.append((tmp_path / "one.tar").read_bytes())
    (tmp_path / "all.tar").write_bytes(b"".join([*parts, b"no header of a file" * 60]))
    table = run(net, tmp_path / "all.tar", tmp_path / "out")
    assert table.keys == keys
    assert torch.allclose(table.tensor("y"), expected(net, tmp_path / "photos", keys), atol=1e-6)


class Numbers:
    """Samples of which one ends the process that reads it, and others cannot be read."""

    def __init__(self, lost: int, *broken: int) -> None:
        self.lost, self.broken = lost, broken

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.lost and multiprocessing.parent_process() is not None:
            os._exit(3)
        if index in self.broken:
            raise ValueError("damaged")
        return torch.full((2,), float(index))


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "broken"), [(8, (9, 10)), (23, ()), (20, (21, 22, 23))])
def test_samples_that_cannot_be_read_beside_one_that_ends_its_process(
    lost: int, broken: tuple[int, ...], tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Identity()).eval()
    table = featx.extract(
        model, {"0": "y"}, Numbers(lost, *broken), tmp_path / "out", load=lambda sample: sample, batch_size=4,
        workers=1, progress=False,
    )  # fmt: skip
    assert sorted(int(key) for key, _ in table.errors) == sorted([lost, *broken])
    assert table.tensor("y")[:, 0].tolist() == [number for number in range(24) if number not in (lost, *broken)]


class EndsOnce:
    """Samples of which one kills the process that reads it, once."""

    def __init__(self, mark: Path, count: int) -> None:
        self.mark, self.count = mark, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 21 and multiprocessing.parent_process() is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 18:
            raise ValueError("damaged")
        size = (3, 32, 32) if index % 8 < 6 else (3, 30, 32)
        return torch.randn(size, generator=torch.Generator().manual_seed(index))


@pytest.mark.slow
def test_rows_go_through_the_model_in_the_same_batches_where_a_reader_was_killed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    ).eval()
    samples = EndsOnce(tmp_path / "mark", 40)
    table = featx.extract(
        net, {"4": "y"}, samples, tmp_path / "out", transform=nn.Identity(), batch_size=8, workers=1,
        rows_per_shard=40, progress=False,
    )  # fmt: skip
    assert samples.mark.exists()
    assert [key for key, _ in table.errors] == ["18"]
    for start in range(0, 40, 8):
        for part in (range(start, start + 6), range(start + 6, start + 8)):  # of one shape
            numbers = [number for number in part if number != 18]
            with torch.no_grad():
                rows = net(torch.stack([samples[number] for number in numbers]))
            assert torch.equal(torch.stack([table.get(str(number))["y"] for number in numbers]), rows)


class Drawn:
    """Samples of random numbers; one kills the process that reads it, once, where there is a mark."""

    def __init__(self, mark: Path | None = None) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        is_reader = multiprocessing.parent_process() is not None
        if index == 7 and is_reader and self.mark is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.rand(2)


@pytest.mark.slow
def test_random_transforms_draw_others_for_other_shards_and_by_the_seed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity()).eval()
    found: list[list[float]] = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        table = featx.extract(
            model, {"0": "y"}, Drawn(), tmp_path / str(len(found)), load=lambda sample: sample, batch_size=2,
            rows_per_shard=4, workers=1, progress=False,
        )  # fmt: skip
        found.append(table.tensor("y").flatten().tolist())
        assert len(set(found[-1])) == 24
    assert set(found[0]).isdisjoint(found[1])
    assert found[0] == found[2]


@pytest.mark.slow
def test_random_transforms_draw_the_same_whichever_process_reads(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity()).eval()
    found: list[torch.Tensor] = []
    for name, workers, mark in (("one", 1, None), ("two", 2, None), ("killed", 1, tmp_path / "mark")):
        table = featx.extract(
            model, {"0": "y"}, Drawn(mark), tmp_path / name, load=lambda sample: sample, batch_size=2,
            rows_per_shard=4, workers=workers, progress=False,
        )  # fmt: skip
        found.append(table.tensor("y"))
    assert (tmp_path / "mark").exists()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": ""}, "features are in a folder"),
        ({"transform": 3}, "transform must be a function"),
        ({"recorded": {"batch_size": 3}}, "is what featx notes itself"),
        ({"recorded": {"a": object()}}, "a dict that json can write"),
    ],
)
def test_wrong_arguments_are_told_at_once(options: dict[str, Any], message: str, net: Net, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 2)
    output = options.pop("output", tmp_path / "out")
    with pytest.raises(featx.ArgumentTypeError, match=message):
        run(net, tmp_path / "photos", output, **options)


class Scaled(nn.Module):
    """Takes a number for each sample, by the largest of which it divides."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * (scale / scale.max())[:, None]


def test_inputs_that_are_one_number_are_changed_too(tmp_path: Path) -> None:
    rows = [{"x": torch.rand(3), "scale": torch.tensor(1.5)}] * 4
    with pytest.raises(featx.RequestError, match=DEPENDS):
        run(Scaled().eval(), rows, tmp_path / "out", transform=None, load=lambda row: row)


def test_sixteen_bits_of_grey_are_rounded(tmp_path: Path) -> None:
    values = np.array([[0, 128, 129, 65278, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    assert np.asarray(decode_image(tmp_path / "a.png"))[0, :, 0].tolist() == [0, 0, 1, 254, 255]


@pytest.mark.slow
def test_the_handler_of_ended_processes_is_as_before(net: Net, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 4)
    list(torch.utils.data.DataLoader([0, 1], num_workers=1))  # with which torch sets its own
    before = signal.getsignal(signal.SIGCHLD)
    run(net, tmp_path / "photos", tmp_path / "out", workers=1)
    assert signal.getsignal(signal.SIGCHLD) is before


@pytest.mark.slow
def test_a_source_whose_first_samples_are_all_broken(net: Net, tmp_path: Path) -> None:
    keys = make_photos(tmp_path / "photos", 130)
    for key in keys[:105]:
        (tmp_path / "photos" / key).write_bytes(b"no image")
    table = run(net, tmp_path / "photos", tmp_path / "out")
    assert table.keys == keys[105:]


class OfVectors(nn.Module):
    """Ends with a batch norm of vectors without running statistics, which raises for one sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("is_extractor", [True, False])
@pytest.mark.parametrize("size", [None, 5])
def test_a_model_that_takes_no_single_sample_is_refused_and_may_be_run_anyway(
    size: int | None, is_extractor: bool, tmp_path: Path
) -> None:
    model, values = OfVectors().eval(), torch.rand(20, 5)
    extractor = featx.create_feature_extractor(model, {"output": "y"}, example_inputs=values[:2])
    given, nodes = (extractor, None) if is_extractor else (model, {"output": "y"})
    options: Any = {"transform": nn.Identity(), "workers": 0, "progress": False, "batch_size": size}
    with pytest.raises(featx.RequestError, match=r"takes two samples and not one.*check_rows=False.*--any-rows"):
        featx.extract(given, nodes, values, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []
    table = featx.extract(given, nodes, values, tmp_path, check_rows=False, **options)
    used = int(table.job.recorded["batch_size"])
    assert used in (size, 4, 16, 64, 256)
    with torch.no_grad():
        torch.testing.assert_close(table.tensor("y"), torch.cat([model(part) for part in values.split(used)]))


def test_a_batch_of_a_size_that_the_model_does_not_take_is_told(tmp_path: Path) -> None:
    with pytest.raises(featx.ExtractionError, match=r"fails on a batch of 1: ValueError.*another batch_size"):
        run(OfVectors().eval(), torch.rand(20, 5), tmp_path, transform=nn.Identity(), batch_size=1, check_rows=False)


@pytest.mark.parametrize(("size", "parts"), [(4, [4, 3, 2]), (3, [3, 3, 3]), (8, [7, 2]), (9, [9]), (5, [5, 4])])
def test_no_sample_is_left_alone_at_the_end(size: int, parts: list[int], tmp_path: Path) -> None:
    model, values = OfVectors().eval(), torch.rand(9, 5)
    table = run(model, values, tmp_path, transform=nn.Identity(), check_rows=False, batch_size=size)
    assert table.errors == []
    with torch.no_grad():
        rows = torch.cat([model(part) for part in values.split(parts)])
    torch.testing.assert_close(table.tensor("y"), rows)


@pytest.mark.parametrize("check_rows", [True, False])
def test_a_feature_without_a_row_for_each_sample_is_refused(check_rows: bool, tmp_path: Path) -> None:
    class OfTwo(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0)[:2]

    with pytest.raises(featx.RequestError, match="so it has no row for each"):
        run(OfTwo().eval(), torch.rand(20, 5), tmp_path, transform=nn.Identity(), check_rows=check_rows)
