"""Sources as people have them: lists with and without headers, tables of pandas and polars, texts, odd files."""

from __future__ import annotations

import shutil
import tarfile
import time
from collections import UserDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

import featx
from featx.bulk.samples.decode import decode_image
from featx.bulk.samples.sources import find_source
from featx.bulk.storage.folder import LocalFolder
from featx.errors import ArgumentTypeError, ExtractionError

from .conftest import expected, make_net, make_photos, pixels


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    """The paths of five photos below `tmp_path / "photos"`, in the order of their keys."""
    return [f"photos/{key}" for key in make_photos(tmp_path / "photos", 5)]


def run(source: Any, folder: Path, **options: Any) -> featx.FeatureTable:
    options = {"transform": pixels, "workers": 0, "progress": False, "batch_size": 4, **options}
    return featx.extract(make_net(), {"fc": "y"}, source, folder / "features", **options)


def texts_of(lines: list[str]) -> Callable[[Path, str], Path]:
    def write(folder: Path, name: str) -> Path:
        (folder / name).write_bytes("\n".join(lines).encode())
        return folder / name

    return write


@pytest.mark.parametrize(
    ("name", "header"),
    [("list.csv", ""), ("list.csv", "path\n"), ("list.csv", "\ufeffpath\n"), ("list.txt", ""), ("list.txt", "\ufeff")],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n", "  \n", "\n\n"])
def test_each_line_of_a_list_is_a_sample(
    name: str, header: str, ending: str, photos: list[str], tmp_path: Path
) -> None:
    text = header + "".join(path + ending for path in photos)
    (tmp_path / name).write_bytes(text.encode())
    table = run(tmp_path / name, tmp_path)
    assert table.keys == photos
    torch.testing.assert_close(table.tensor("y"), expected(make_net(), tmp_path, photos))


def test_numbers_in_a_table_keep_their_digits(tmp_path: Path) -> None:
    (tmp_path / "ids.csv").write_text("path\n000\n001\n")
    load = {"000": torch.zeros(3, 16, 16), "001": torch.ones(3, 16, 16)}
    table = run(tmp_path / "ids.csv", tmp_path, load=lambda path: load[Path(path).name], transform=None)
    assert table.keys == ["000", "001"]
    assert not table.errors


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.csv", b"photo\nx.png\n", "columns photo; say which one"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"path,n\nx.png,1\ny.png,2,3\n", "line 3 .* has 3 values"),
        ("a.csv", b"path,n\nx.png,1\n,2\n", "line 3 .* no value"),
        ("a.txt", b"caf\xe9.png\n", "no text in UTF-8"),
        ("a.parquet", b"nothing", "cannot be read as Parquet"),
    ],
)
def test_list_that_cannot_be_read_is_named(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ExtractionError, match=words) as raised:
        run(tmp_path / name, tmp_path)
    assert name in str(raised.value)
    assert not (tmp_path / "features").exists()


@pytest.mark.parametrize(
    ("values", "words"), [([{"bytes": b"x", "path": None}], "load_dataset"), (["x.png", None], "row 1 .* no value")]
)
def test_column_of_parquet_without_paths_is_refused(values: list[Any], words: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": values}), tmp_path / "list.parquet")
    with pytest.raises(ExtractionError, match=words):
        run(tmp_path / "list.parquet", tmp_path)


def as_series(paths: list[str]) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.Series(["nothing.png", *paths]).iloc[1:]


def as_frame(paths: list[str]) -> Any:
    return pytest.importorskip("pandas").DataFrame({"number": range(len(paths)), "path": paths})


def as_polars(paths: list[str]) -> Any:
    return pytest.importorskip("polars").Series(paths)


def as_frame_of_polars(paths: list[str]) -> Any:
    return pytest.importorskip("polars").DataFrame({"path": paths})


def as_table(paths: list[str]) -> Any:
    return pa.table({"path": paths})


@pytest.mark.parametrize("make", [as_series, as_frame, as_polars, as_frame_of_polars, as_table, np.array])
def test_column_is_a_list_of_paths(make: Callable[[list[str]], Any], photos: list[str], tmp_path: Path) -> None:
    paths = [str(tmp_path / path) for path in photos]
    table = run(make(paths), tmp_path)
    assert table.keys == paths
    torch.testing.assert_close(table.tensor("y"), expected(make_net(), tmp_path, photos))


def test_load_gets_texts_of_a_column_as_they_are(tmp_path: Path) -> None:
    texts = ["hello world", "see http://example.org now", "hello world"]
    (tmp_path / "texts.csv").write_text("id,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts)))
    seen: list[Any] = []

    def load(text: str) -> torch.Tensor:
        seen.append(text)
        return torch.full((3, 16, 16), float(len(text)))

    table = run(tmp_path / "texts.csv", tmp_path, load=load, column="text", transform=None)
    assert table.keys == ["0", "1", "2"]
    assert set(seen) == set(texts)
    assert torch.equal(table.tensor("y")[0], table.tensor("y")[2])


def test_load_gets_paths_of_a_column_that_holds_files(photos: list[str], tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("number,video\n" + "".join(f"{n},{path}\n" for n, path in enumerate(photos)))
    seen: list[Any] = []

    def load(path: str) -> torch.Tensor:
        seen.append(path)
        return pixels(Image.open(path).convert("RGB"))

    table = run(tmp_path / "list.csv", tmp_path, load=load, column="video", transform=None)
    assert table.keys == photos
    assert {Path(path) for path in seen} == {tmp_path / path for path in photos}
    torch.testing.assert_close(table.tensor("y"), expected(make_net(), tmp_path, photos))


VIDEOS = {"b/2.npy": 2.0, "1.npy": 1.0, "b/3.npy": 3.0}


def video(value: float) -> bytes:
    file = BytesIO()
    np.save(file, np.full((3, 16, 16), value, dtype=np.float32))
    return file.getvalue()


def in_folder(folder: Path) -> Any:
    for path, value in {**VIDEOS, ".hidden.npy": 9.0, ".cache/4.npy": 9.0}.items():
        (folder / "videos" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "videos" / path).write_bytes(video(value))
    return folder / "videos"


def at_url(folder: Path) -> Any:
    files = fsspec.filesystem("memory")
    for path, value in {**VIDEOS, ".hidden.npy": 9.0}.items():
        files.pipe(f"/{folder.name}/{path}", video(value))
    return f"memory://{folder.name}"


def in_tar(folder: Path) -> Any:
    in_folder(folder)
    with tarfile.open(folder / "videos.tar", "w") as tar:
        tar.add(folder / "videos", ".")
    return folder / "videos.tar"


@pytest.mark.parametrize("make", [in_folder, at_url, in_tar])
def test_load_gets_the_files_of_a_folder_without_images(make: Callable[[Path], Any], tmp_path: Path) -> None:
    source = make(tmp_path)
    with pytest.raises(ExtractionError, match=r"0 images, . other files left out\); load=\.\.\., a function"):
        run(source, tmp_path)
    table = run(source, tmp_path, load=np.load, transform=None)
    values = torch.tensor([VIDEOS[key.removeprefix("./")] for key in table.keys])
    assert sorted(values.tolist()) == [1, 2, 3]
    with torch.no_grad():
        wanted = make_net()(values.view(-1, 1, 1, 1).expand(-1, 3, 16, 16))
    torch.testing.assert_close(table.tensor("y"), wanted)


def linked(name: str, to: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.LNKTYPE, to
    return member


def test_hard_links_of_a_tar_are_the_files_that_they_name(tmp_path: Path) -> None:
    [key] = make_photos(tmp_path / "photos", 1)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "photos" / key, key)
        tar.addfile(linked("again.png", key))
        tar.addfile(linked("notes.txt", "nowhere.txt"))  # of a file that is left out, nothing is asked
    table = run(tmp_path / "a.tar", tmp_path)
    assert list(table.keys) == [key, "again.png"]
    assert torch.equal(table.tensor("y")[0], table.tensor("y")[1])
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        tar.addfile(linked("again.png", "nowhere.png"))
    with pytest.raises(
        ExtractionError, match=r"b\.tar' cannot be read as a tar file: 'again\.png' is a link to nothing"
    ):
        run(tmp_path / "b.tar", tmp_path)


def test_load_gets_the_images_of_a_folder_that_has_some(tmp_path: Path) -> None:
    keys = make_photos(in_folder(tmp_path), 2)
    table = run(tmp_path / "videos", tmp_path, load=lambda path: pixels(Image.open(path)), transform=None)
    assert list(table.keys) == sorted(keys)


def test_files_of_a_folder_that_are_no_images_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_photos(tmp_path / "photos", 2)
    for suffix in (".jfif", ".jpe", ".pgm", ".tga"):
        image = Image.new("RGB" if suffix != ".pgm" else "L", (16, 16))
        image.save(tmp_path / "photos" / f"a{suffix}", format="JPEG" if suffix in (".jfif", ".jpe") else None)
    (tmp_path / "photos/readme.md").write_text("what this is")
    # What macOS and viewers of images leave there.
    (tmp_path / "photos/._a.jpe").write_bytes(b"no image")
    make_photos(tmp_path / "photos/.thumbnails", 2)
    table = run(tmp_path / "photos", tmp_path, progress=True)
    assert len(table.keys) == 6
    assert "(6 images, 2 other files left out)" in capsys.readouterr().err


def test_name_that_is_not_utf_8_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 2)
    shutil.copy(tmp_path / "photos/001.png", bytes(tmp_path / "photos") + b"/caf\xe9.png")
    with pytest.raises(ExtractionError, match="rename that file"):
        run(tmp_path / "photos", tmp_path)
    assert not (tmp_path / "features").exists()


@pytest.mark.parametrize("mode", ["F", "I"])
def test_image_of_32_bits_is_a_failure(mode: str, tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 2)
    image = Image.new(mode, (16, 16), 1)
    image.save(tmp_path / "photos/z.tif")
    table = run(tmp_path / "photos", tmp_path)
    ((key, reason),) = table.errors
    assert key == "z.tif"
    assert "32 bits" in reason


def test_image_of_16_bits_is_scaled(tmp_path: Path) -> None:
    grey = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(grey * 257).save(tmp_path / "grey.png")
    decoded = np.asarray(decode_image(str(tmp_path / "grey.png")))
    assert np.array_equal(decoded, np.repeat(grey[..., None], 3, 2))


class Normalized(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(index)) - 0.5


@pytest.mark.slow
def test_tensors_are_not_normalized_a_second_time(tmp_path: Path) -> None:
    model, data = timm.create_model("resnet10t", pretrained=False, num_classes=0).eval(), Normalized()
    options: Any = {"workers": 0, "progress": False, "batch_size": 1}
    with pytest.raises(ArgumentTypeError, match="Identity"):
        featx.extract(model, {"global_pool": "y"}, data, tmp_path / "features", **options)
    table = featx.extract(model, {"global_pool": "y"}, data, tmp_path / "features", transform=nn.Identity(), **options)
    with torch.no_grad():
        assert torch.equal(table.tensor("y"), torch.cat([model(data[number][None]) for number in range(3)]))


class Reordered(Normalized):
    """Another data set with the same first sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index and 3 - index)


def test_another_data_set_with_the_same_first_sample_is_refused(tmp_path: Path) -> None:
    run(Normalized(), tmp_path, transform=nn.Identity())
    run(Normalized(), tmp_path, transform=nn.Identity())
    with pytest.raises(ExtractionError, match="its sample is"):
        run(Reordered(), tmp_path, transform=nn.Identity())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_each_changed_bit_is_found_and_the_next_step_named(kind: Any, tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", 5)
    table = run(tmp_path / "photos", tmp_path, format=kind)
    (file,) = map(Path, table.paths)
    whole, values = file.read_bytes(), table.tensor("y")
    for place in range(0, len(whole), len(whole) // 60):
        changed = bytearray(whole)
        changed[place] ^= 4
        file.write_bytes(changed)
        found = featx.verify(tmp_path / "features")
        if not found.faults:  # a bit that means nothing
            assert torch.equal(featx.open_features(tmp_path / "features").tensor("y"), values)
        assert all("run the job again" in fault for fault in found.faults)
    file.unlink()
    assert run(tmp_path / "photos", tmp_path, format=kind).keys == photos
    assert file.read_bytes() == whole


def test_folder_of_features_is_a_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    make_photos(tmp_path / "photos", 5)
    run(tmp_path / "photos", tmp_path)
    loaded = datasets.load_dataset(str(tmp_path / "features"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.num_rows == 5


class Tensors(Dataset[torch.Tensor]):
    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_images_have_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).eval().to(dtype)
    images = torch.rand(5, 3, 6, 6)
    with torch.no_grad():
        features = model(images.to(dtype))
    data = Tensors(images)
    table = featx.extract(
        model,
        {"1": featx.Feature("f", dtype=torch.float32)},
        data,
        tmp_path / "out",
        transform=lambda image: image,
        progress=False,
    )
    torch.testing.assert_close(table.tensor("f"), features.float(), rtol=1e-2, atol=1e-2)


def test_a_model_that_fails_on_the_first_sample_is_told_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(7, 2))
    with pytest.raises(featx.ExtractionError, match=r"fails on the first sample: RuntimeError: .*mat1 and mat2"):
        featx.extract(
            model, ["0"], Tensors(torch.rand(3, 3, 6, 6)), tmp_path / "out", transform=lambda x: x, progress=False
        )


@pytest.mark.slow
def test_another_job_is_told_by_what_differs_in_a_long_text(tmp_path: Path) -> None:
    data, model = Tensors(torch.rand(3, 3, 8, 8)), nn.Sequential(*[nn.Conv2d(3, 3, 1) for _ in range(12)]).eval()
    for pool, error in (("avg", None), ("max", "its code is '.*mean.*', and here it is '.*amax")):
        job = {"10": featx.Feature("C", pool=pool)}
        if error is None:
            featx.extract(model, job, data, tmp_path / "out", transform=lambda x: x, progress=False)
        else:
            with pytest.raises(featx.ExtractionError, match=error):
                featx.extract(model, job, data, tmp_path / "out", transform=lambda x: x, progress=False)


# -- transforms and samples as people have them -----------------------------------------------------------------------


class Compose(v1.Compose):
    """Has the name of torchvision's class, and does more than its steps."""

    def __call__(self, img: Any) -> Any:
        return super().__call__(Image.fromarray(np.asarray(img)[..., ::-1].copy()))


NORMALIZED = [v1.Resize((16, 16)), v1.ToTensor(), v1.Normalize([0.5, 0.4, 0.3], [0.3, 0.2, 0.1])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [v1.Compose, Compose, v2.Compose])
def test_a_transform_is_called_as_it_is(kind: Any, photos: list[str], tmp_path: Path) -> None:
    transform = kind(NORMALIZED)
    table = run(tmp_path / "photos", tmp_path, transform=transform)
    images = torch.stack([transform(Image.open(tmp_path / "photos" / key)) for key in table.keys])
    with torch.no_grad():
        torch.testing.assert_close(table.tensor("y"), make_net()(images))


def test_other_numbers_of_channels_are_refused_as_torchvision_does(photos: list[str], tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match=r"output with shape \[1, .* doesn't match"):
        run(tmp_path / "photos", tmp_path, transform=v1.Compose([v1.Grayscale(), *NORMALIZED]))


ARRAYS = np.random.default_rng(0).integers(0, 255, (5, 16, 16, 3), dtype=np.uint8)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return len(ARRAYS)

    def __getitem__(self, index: int) -> Any:
        return ARRAYS[index], index


SAMPLES: dict[str, Any] = {
    "array of images": ARRAYS,
    "data set of arrays": Pairs(),
    "list of arrays": list(ARRAYS),
    "list of images": [Image.fromarray(array) for array in ARRAYS],
    "list of pairs": [(array, 0) for array in ARRAYS],
}


@pytest.mark.parametrize("name", SAMPLES)
def test_arrays_and_images_are_samples(name: str, tmp_path: Path) -> None:
    table = run(SAMPLES[name], tmp_path, transform=v1.ToTensor())
    images = torch.from_numpy(ARRAYS).permute(0, 3, 1, 2).float() / 255
    assert table.keys == ["0", "1", "2", "3", "4"]
    with torch.no_grad():
        torch.testing.assert_close(table.tensor("y"), make_net()(images))


def test_arrays_are_not_normalized_a_second_time(tmp_path: Path) -> None:
    model = timm.create_model("resnet10t", pretrained=False).eval()
    with pytest.raises(ArgumentTypeError, match="the samples are arrays, and the preprocessing"):
        featx.extract(model, ["layer1"], ARRAYS, tmp_path / "features", workers=0, progress=False)


MISTAKES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no tensor": (ARRAYS[:1], {"transform": Image.fromarray}, r"end it with ToTensor\(\)"),
    "dict": ([{"photo": ARRAYS[0], "label": 1}], {}, r"a dict of 'photo', 'label'; give column="),
    "object": ([object()], {}, r"is a object, and no image, array or tensor; give load="),
    "null in a list": (["a.png", None], {}, "item 1 of the list is None, and no path or URL; take it out"),
    "null in a column": (pl.DataFrame({"path": ["a.png", None]}), {}, "item 1 of the list is None"),
    "plain dict": ({"a.png": 1}, {}, "got a dict"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_with_the_next_step(name: str, tmp_path: Path) -> None:
    source, options, words = MISTAKES[name]
    with pytest.raises((ExtractionError, ArgumentTypeError), match=words):
        run(source, tmp_path, **options)


def slow(number: torch.Tensor) -> torch.Tensor:
    """What takes 0.1 s for each sample, and 100 s for the fourth one."""
    time.sleep(100 if number == 3 else 0.1)
    return torch.full((3, 16, 16), float(number))


@pytest.mark.slow
def test_a_sample_that_takes_too_long_is_a_failure_and_a_batch_that_does_is_none(tmp_path: Path) -> None:
    options: dict[str, Any] = {"load": slow, "transform": None, "workers": 1, "timeout": 1.0, "batch_size": 32}
    table = run(torch.arange(32.0), tmp_path, **options)  # a batch of four seconds
    assert len(table) == 31
    assert table.errors == [("3", "TimeoutError: reading it took more than 1 s")]


@pytest.mark.slow
def test_a_processor_of_transformers_is_a_transform(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    make_photos(tmp_path / "photos", 3)
    table = run(tmp_path / "photos", tmp_path, transform=processor)
    images = [Image.open(tmp_path / "photos" / key) for key in table.keys]
    with torch.no_grad():
        expected = make_net()(processor(images, return_tensors="pt")["pixel_values"])
    torch.testing.assert_close(table.tensor("y"), expected)


def test_a_sample_that_is_a_batch_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match=r"A sample has no dimension for the batch; take the first item"):
        run(torch.rand(3, 1, 3, 16, 16), tmp_path, transform=None, load=torch.clone)


PATTERNS: dict[str, tuple[str, list[str]]] = {
    "a folder": ("photos/*.png", ["001.png", "002.png", "cat [1].png"]),
    "all folders": ("photos/**/*.png", ["001.png", "002.png", "cat [1].png", "sub/003.png"]),
    "part of a name": ("photos/00*", ["001.png", "002.png"]),
    "braces": ("photos/{001,002}.png", ["001.png", "002.png"]),
    "both, twice": ("photos/{00*,001,0*}.png", ["001.png", "002.png"]),
    "brackets": ("photos/[0][01][12].png", ["001.png", "002.png"]),
    "a question mark": ("photos/00?.png", ["001.png", "002.png"]),
    "folders": ("photos/s*/*", ["sub/003.png"]),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_pattern_stands_for_the_files_that_fit(
    name: str, is_absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, keys = PATTERNS[name]
    (tmp_path / "photos" / "sub").mkdir(parents=True)
    for key in ("001.png", "002.png", "cat [1].png", "sub/003.png", "005.txt", ".hidden.png"):
        Image.new("RGB", (8, 8), (len(key), 0, 0)).save(tmp_path / "photos" / key, format="png")
    monkeypatch.chdir(tmp_path)
    source = find_source(str(tmp_path / pattern) if is_absolute else pattern)
    assert list(source.keys) == keys
    sizes = [Image.open(source.item(number)).convert("RGB").getpixel((0, 0)) for number in range(len(keys))]
    assert sizes == [(len(key), 0, 0) for key in keys]


@pytest.mark.parametrize("pattern", ["photos/*.jpg", "nowhere/*.png"])
def test_a_pattern_that_fits_nothing(pattern: str, photos: list[str], tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match=r"no file fits the pattern .*check its folder and its ending"):
        find_source(str(tmp_path / pattern))
    with pytest.raises(ArgumentTypeError, match="column='path' is for tables"):
        find_source(str(tmp_path / "photos/*.png"), "path")


def test_a_pattern_goes_through_no_links_that_lead_back(photos: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    expected_keys = find_source(f"{folder}/**/*.png").keys
    (folder / "here").symlink_to(".")
    (folder / "more" / "up").symlink_to("..")
    assert find_source(f"{folder}/**/*.png").keys == expected_keys == find_source(folder).keys


def test_a_tar_in_capitals_and_a_folder_with_colons(photos: list[str], tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "ALL.TAR", "w") as tar:
        tar.add(tmp_path / "photos" / "001.png", "1.png")
    assert find_source(tmp_path / "ALL.TAR").keys == ["1.png"]
    (tmp_path / "photos").rename(tmp_path / "a::b")
    assert list(find_source(f"{tmp_path}/a::b/*2.png").keys) == ["002.png"]


def test_braces_of_names_and_stars(photos: list[str], tmp_path: Path) -> None:
    for pattern in ("{001.png,more/*.png,001.png}", "{more/*.png,001.png}"):
        keys = find_source(f"{tmp_path}/photos/{pattern}").keys
        assert list(keys) == ["001.png", "more/000.png", "more/003.png"]


@pytest.mark.parametrize("name", ["box [2024]", "a{b}", "what?"])
def test_a_pattern_below_a_folder_with_marks_in_its_name(
    name: str, photos: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "photos").rename(tmp_path / name)
    assert list(find_source(f"{tmp_path}/{name}//00*.png").keys) == ["001.png", "002.png", "004.png"]
    with pytest.raises(ExtractionError, match=r"there is no .*none"):
        find_source(f"{tmp_path}/{name}/none")
    monkeypatch.chdir(tmp_path / name)
    assert list(find_source("*2.png").keys) == ["002.png"]


def test_a_star_in_a_name_is_no_pattern(photos: list[str], tmp_path: Path) -> None:
    folder = (tmp_path / "photos").rename(tmp_path / "ph*{tos")
    assert len(find_source(folder).keys) == 5


def test_features_do_not_go_below_a_file(photos: list[str], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ExtractionError, match=r"taken' is a file, and features go to a folder; choose another place"):
        run(tmp_path / "photos", tmp_path / "taken" / "below")
    with pytest.raises(ExtractionError, match=r"/proc/features' cannot be made: .*; choose another place"):
        LocalFolder("/proc/features").make()


def test_column_that_a_transform_of_hugging_face_makes() -> None:
    datasets = pytest.importorskip("datasets")
    names = ["a.png", "bc.png", "def.png"]
    table = datasets.Dataset.from_dict({"image": names, "label": [0, 1, 2]})

    def prepared(rows: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": [torch.full((3,), float(len(path))) for path in rows["image"]], "label": rows["label"]}

    source = find_source(table.with_transform(prepared))
    assert torch.equal(source.item(0), torch.full((3,), 5.0))
    assert source.keys == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "torch"])
def test_rows_of_a_tokenized_data_set_are_inputs_by_name(form: str | None, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    class CountsTokens(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return (input_ids * attention_mask).sum(1, keepdim=True).float()

    rows = {"text": ["a", "b", "c"], "input_ids": [[1, 2], [3], [4, 5]], "attention_mask": [[1, 1], [1], [1, 0]]}
    table = datasets.Dataset.from_dict({**rows, "label": [0, 1, 0]}).with_format(form)
    found = featx.extract(CountsTokens(), {"output": "sum"}, table, tmp_path / "out", workers=0, progress=False)
    assert found.errors == []
    assert found.tensor("sum").flatten().tolist() == [3.0, 3.0, 4.0]
    ids = torch.ones(2, 2, dtype=torch.long)
    extractor = featx.create_feature_extractor(
        CountsTokens(), {"output": "sum"}, example_inputs=(ids, ids), adaptive=True
    )
    found = featx.extract(extractor.eval(), None, table, tmp_path / "adaptive", workers=0, progress=False)
    assert found.tensor("sum").flatten().tolist() == [3.0, 3.0, 4.0]
    with pytest.raises(ExtractionError, match="no input of the name of a column"):
        featx.extract(nn.Identity(), ["output"], table, tmp_path / "unknown", workers=0, progress=False)
    seen: list[Any] = []

    def load(row: Any) -> torch.Tensor:
        seen.append(row)
        return torch.zeros(3)

    other = datasets.Dataset.from_dict({"first": [1, 2], "second": [3, 4]})
    featx.extract(nn.Identity(), {"output": "x"}, other, tmp_path / "other", load=load, workers=0, progress=False)
    assert seen[0] == {"first": 1, "second": 3}


@pytest.mark.parametrize("is_list", [True, False])
def test_samples_with_token_ids_are_inputs_by_name(is_list: bool, tmp_path: Path) -> None:
    class CountsTokens(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return (input_ids * attention_mask).sum(1, keepdim=True).float()

    class Texts(Dataset[Any]):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> Any:
            return samples[index]

    ids, masks = ([1, 2], [3], [4, 5]), ([1, 1], [1], [1, 0])
    samples = [
        {"input_ids": torch.tensor(each), "attention_mask": torch.tensor(mask), "label": 1}
        for each, mask in zip(ids, masks, strict=True)
    ]
    source = samples if is_list else Texts()
    found = featx.extract(CountsTokens(), {"output": "sum"}, source, tmp_path / "out", workers=0, progress=False)
    assert found.errors == []
    assert found.tensor("sum").flatten().tolist() == [3.0, 3.0, 4.0]


def test_what_has_no_such_column_is_told(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"image": [0, 1], "label": [1, 2]})
    with pytest.raises(featx.ExtractionError, match="no column 'pic'; its columns are image, label"):
        find_source(table, "pic")
    with pytest.raises(featx.ArgumentTypeError, match=r"column='image' is for tables and data sets, and the folder"):
        find_source(tmp_path, "image")
    with pytest.raises(featx.ExtractionError, match=r"splits train; give one of them: dataset\['train'\]"):
        find_source(datasets.DatasetDict({"train": table}))


def test_a_column_whose_name_is_a_number(photos: list[str], tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame([[1, str(tmp_path / each)] for each in photos])  # as read_csv(header=None) makes it
    names: list[Any] = ["1", 1]
    for column in names:
        assert len(find_source(table, column).keys) == len(photos)
    with pytest.raises(featx.ExtractionError, match="has the columns 0, 1; say which one"):
        find_source(table)


def test_a_data_loader_is_told_to_be_its_data_set() -> None:
    loader = torch.utils.data.DataLoader([torch.rand(3)] * 4)
    with pytest.raises(featx.ArgumentTypeError, match=r"give loader\.dataset"):
        find_source(loader)


def test_tars_of_one_name_in_two_folders(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", 2)
    paths = [tmp_path / part / "000.tar" for part in ("train", "val")]
    for path in paths:
        path.parent.mkdir()
        with tarfile.open(path, "w") as tar:
            tar.add(tmp_path / "photos" / "001.png", "a.png")
    assert run([str(path) for path in paths], tmp_path).keys == ["train/000/a.png", "val/000/a.png"]


@pytest.mark.parametrize("name", ["image", "pixel_values"])
def test_samples_that_are_dicts_have_their_image_under_a_usual_name(name: str, tmp_path: Path) -> None:
    class Labelled(Normalized):
        def __getitem__(self, index: int) -> Any:
            return {"label": index, name: super().__getitem__(index)}

    table = run(Labelled(), tmp_path, transform=nn.Identity())
    plain = run(Normalized(), tmp_path / "plain", transform=nn.Identity())
    assert torch.equal(table.tensor("y"), plain.tensor("y"))


def test_advice_for_an_image_of_one_channel_is_about_channels(photos: list[str], tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match=r"3 channels.*It got the shape \(2, 1, 16, 16\)") as raised:
        run(tmp_path / "photos", tmp_path, transform=lambda image: pixels(image)[:1])
    assert "dimension for the batch" not in str(raised.value)


@pytest.mark.parametrize("kind", ["list", "generator", "text", "tar", "pattern of tars"])
def test_column_of_what_has_no_columns_is_refused(kind: str, photos: list[str], tmp_path: Path) -> None:
    paths = [str(tmp_path / each) for each in photos]
    (tmp_path / "list.txt").write_text("\n".join(paths))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(paths[0], "0.png")
    sources: dict[str, Any] = {
        "list": paths, "generator": iter(paths), "text": tmp_path / "list.txt", "tar": tmp_path / "a.tar",
        "pattern of tars": str(tmp_path / "*.tar"),
    }  # fmt: skip
    with pytest.raises(ArgumentTypeError, match=r"column='label' is for tables and data sets, and .* has no columns"):
        run(sources[kind], tmp_path, column="label")


def test_empty_text_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match="the source is an empty text"):
        run("", tmp_path)


def test_undecoded_images_of_a_data_set_may_be_paths(photos: list[str], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = [str(tmp_path / each) for each in photos]
    dataset = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image(decode=False))
    assert dataset[0]["image"]["bytes"] is None
    table = run(dataset, tmp_path)
    assert torch.allclose(table.tensor("y"), expected(make_net(), tmp_path, photos), atol=1e-6)


def test_texts_that_repeat_are_told_from_paths(tmp_path: Path) -> None:
    with pytest.raises(ExtractionError, match=r"the key 'a b' stands for two samples.*If these are texts, .*column="):
        run(["a b", "c", "a b"], tmp_path, load=len)


class Texts(Dataset[str]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return "abc" * (index + 1)


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embedding(input_ids)).mean(1)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_what_a_tokenizer_returns_is_an_input(kind: Any, tmp_path: Path) -> None:
    """Lists of numbers, in a dict or, as by transformers, in a UserDict."""
    torch.manual_seed(0)
    model = Embeds().eval()
    options = {"load": lambda text: kind(input_ids=[len(text) % 10, 1, 2]), "workers": 0, "progress": False}
    table = featx.extract(model, {"output": "y"}, Texts(), tmp_path / "out", batch_size=3, **options)
    with torch.no_grad():
        found = model(torch.tensor([[len(text) % 10, 1, 2] for text in (Texts()[place] for place in range(4))]))
    assert torch.allclose(table.tensor("y"), found, atol=1e-6)
