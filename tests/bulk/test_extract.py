"""extract: each sample of a source in exactly one of rows and failures, with the values of the model."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn

import featx
from featx import Feature
from featx.bulk.jobs.compute import Runner
from featx.bulk.samples.decode import decode_image

from .conftest import Net, expected, make_net, pixels


def run(net: nn.Module, source: Any, output: Path, nodes: Any = None, **options: Any) -> featx.FeatureTable:
    options = {"transform": pixels, "workers": 0, "batch_size": 4, "rows_per_shard": 8, "progress": False, **options}
    return featx.extract(net, nodes or {"fc": "logits"}, source, output, **options)


def keys_in(folder: Path) -> list[str]:
    return sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*.png"))


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_what_the_model_computes(net: Net, photos: Path, tmp_path: Path, workers: int) -> None:
    table = run(net, photos, tmp_path / "out", workers=workers)
    keys = keys_in(photos)
    assert table.keys == keys
    assert table.is_complete
    assert table.errors == []
    torch.testing.assert_close(table.tensor("logits"), expected(net, photos, keys))
    assert len(table.paths) == 3
    assert featx.verify(tmp_path / "out").is_complete


class DecidesBySize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return (nn.functional.max_pool2d(x, 2) if x.shape[-1] > 40 else x).mean((2, 3))


@pytest.mark.slow
def test_an_adaptive_extractor_takes_images_that_the_model_treats_otherwise(photos: Path, tmp_path: Path) -> None:
    for name, size in (("small.png", 20), ("large.png", 70)):
        Image.new("RGB", (size, size), "red").save(photos / name)
    model = DecidesBySize().eval()
    extractor = featx.create_feature_extractor(
        model, {"output": "all"}, example_inputs=torch.rand(2, 3, 40, 50), adaptive=True
    )
    options: Any = {"transform": pixels, "workers": 0, "batch_size": 4, "progress": False}
    table = featx.extract(extractor, None, photos, tmp_path / "out", **options)
    assert table.errors == []
    for place, key in enumerate(table.keys):
        image = pixels(Image.open(photos / key).convert("RGB"))[None]
        torch.testing.assert_close(table.tensor("all")[place], model(image)[0])
    model.conv.padding = (1, 1)
    with pytest.raises(featx.ExtractionError, match=r"its modules is .* a counter or a cache"):
        featx.extract(extractor, None, photos, tmp_path / "out", **options)


@pytest.mark.slow
def test_a_batch_of_one_gives_the_same_bits(net: Net, photos: Path, tmp_path: Path) -> None:
    table = run(net, photos, tmp_path / "out", batch_size=1)
    assert torch.equal(table.tensor("logits"), expected(net, photos, table.keys))


@pytest.mark.slow
def test_several_features_in_several_dtypes(net: Net, photos: Path, tmp_path: Path) -> None:
    nodes = {
        "conv": [Feature("half", pool="avg", dtype=torch.float16), Feature("double", pool="max", dtype=torch.float64)],
        "fc": Feature("best", apply=_best),
    }
    table = run(net, photos, tmp_path / "out", nodes)
    maps = torch.cat([net.conv(pixels(Image.open(photos / key).convert("RGB"))[None]) for key in table.keys]).detach()
    torch.testing.assert_close(table.tensor("half"), maps.mean((2, 3)).half(), atol=1e-3, rtol=1e-3)
    double = table.tensor("double")
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), maps.amax((2, 3)))  # computed in float32, in another batch
    assert table.tensor("best").dtype == torch.int64
    assert torch.equal(table.tensor("best"), expected(net, photos, table.keys).argmax(1))
    assert [column.shape for column in table.columns] == [(4,), (4,), ()]


def _best(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(1)


@pytest.mark.slow
def test_maps_go_into_arrow_files(net: Net, photos: Path, tmp_path: Path) -> None:
    table = run(net, photos, tmp_path / "out", {"conv": "map"})
    assert all(path.endswith(".arrow") for path in table.paths)
    first = net.conv(pixels(Image.open(photos / table.keys[0]).convert("RGB"))[None])[0].detach()
    torch.testing.assert_close(table[0]["map"], first)
    assert table.tensor("map").shape == (20, 4, 7, 7)


@pytest.mark.slow
def test_the_model_is_as_before(net: Net, photos: Path, tmp_path: Path) -> None:
    net.train()
    net.norm.eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run(net, photos, tmp_path / "out")
    assert net.training
    assert not net.norm.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    # And it ran in eval mode.
    table = featx.open_features(tmp_path / "out")
    torch.testing.assert_close(table.tensor("logits"), expected(make_net(), photos, table.keys))


@pytest.mark.slow
def test_an_extractor_is_taken_as_it_is(net: Net, photos: Path, tmp_path: Path) -> None:
    extractor = featx.create_feature_extractor(net, {"fc": "logits"}, example_inputs=torch.rand(2, 3, 16, 16))
    extractor.train()
    table = featx.extract(extractor, None, photos, tmp_path / "out", transform=pixels, workers=0, progress=False)
    torch.testing.assert_close(table.tensor("logits"), expected(net.eval(), photos, table.keys))
    with pytest.raises(featx.ArgumentTypeError, match="nodes=None is for an extractor, and the model is a Net"):
        featx.extract(net, None, photos, tmp_path / "other", transform=pixels, progress=False)


def test_a_backbone_that_returns_a_list_is_taken(net: Net, photos: Path, tmp_path: Path) -> None:
    backbone = featx.create_backbone(net, strides=2, as_list=True, example_inputs=torch.rand(2, 3, 16, 16))
    table = featx.extract(backbone, None, photos, tmp_path / "out", transform=pixels, workers=0, progress=False)
    images = torch.stack([pixels(Image.open(photos / key).convert("RGB")) for key in table.keys])
    with torch.no_grad():
        (maps,) = backbone.eval()(images)
    torch.testing.assert_close(table.tensor("0"), maps)


# -- sources --------------------------------------------------------------------------------------------------------


def _as_list(photos: Path, tmp_path: Path) -> Any:
    return [photos / key for key in keys_in(photos)]


def _as_text(photos: Path, tmp_path: Path) -> Any:
    (photos / "list.txt").write_text("\n".join(keys_in(photos)))
    return photos / "list.txt"


def _as_csv(photos: Path, tmp_path: Path) -> Any:
    (photos / "list.csv").write_text("label,path\n" + "\n".join(f"1,{key}" for key in keys_in(photos)))
    return str(photos / "list.csv")


def _as_parquet(photos: Path, tmp_path: Path) -> Any:
    pq.write_table(pa.table({"path": keys_in(photos), "label": [1] * 20}), photos / "list.parquet")
    return photos / "list.parquet"


def _as_urls(photos: Path, tmp_path: Path) -> Any:
    return [f"file://{photos / key}" for key in keys_in(photos)]


def _as_tar(photos: Path, tmp_path: Path) -> Any:
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for key in keys_in(photos):
            tar.add(photos / key, key)
    return tmp_path / "all.tar"


def _as_two_tars(photos: Path, tmp_path: Path) -> Any:
    for name, keys in (("a", keys_in(photos)[:11]), ("b", keys_in(photos)[11:])):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for key in keys:
                tar.add(photos / key, key)
    return [tmp_path / "a.tar", tmp_path / "b.tar"]


def _as_braces(photos: Path, tmp_path: Path) -> Any:
    _as_two_tars(photos, tmp_path)
    return tmp_path / "{a..b}.tar"


def _as_star(photos: Path, tmp_path: Path) -> Any:
    _as_two_tars(photos, tmp_path)
    return str(tmp_path / "*.tar")


def _as_star_in_a_url(photos: Path, tmp_path: Path) -> Any:
    _as_two_tars(photos, tmp_path)
    return f"file://{tmp_path}/*.tar"


class OfTorch(torch.utils.data.Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.paths = [folder / key for key in keys_in(folder)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return Image.open(self.paths[number]), number


def _as_dataset(photos: Path, tmp_path: Path) -> Any:
    return OfTorch(photos)


SOURCES = {
    function.__name__.removeprefix("_as_"): function
    for function in (
        _as_list,
        _as_text,
        _as_csv,
        _as_parquet,
        _as_urls,
        _as_tar,
        _as_two_tars,
        _as_braces,
        _as_star,
        _as_star_in_a_url,
        _as_dataset,
    )
}


@pytest.mark.parametrize("name", SOURCES)
def test_samples_come_from(net: Net, photos: Path, tmp_path: Path, name: str) -> None:
    source = SOURCES[name](photos, tmp_path)
    table = run(net, source, tmp_path / "out")
    assert len(table) == len(set(table.keys)) == 20
    torch.testing.assert_close(table.tensor("logits"), expected(net, photos, keys_in(photos)))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{000..003}.tar", r"there is no '.*000\.tar'"),
        ("data-*.tar", r"no file fits the pattern '.*data-\*\.tar'"),
        ("{0..3.tar", r"cannot be read as a pattern"),
    ],
)
def test_a_pattern_that_fits_no_file_is_refused(net: Net, tmp_path: Path, pattern: str, message: str) -> None:
    with pytest.raises(featx.ExtractionError, match=message):
        run(net, tmp_path / pattern, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_data_set_of_hugging_face(net: Net, photos: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = [str(photos / key) for key in keys_in(photos)]
    dataset = datasets.Dataset.from_dict({"image": paths, "n": list(range(20))})
    dataset.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "hf")
    for number, source in enumerate((tmp_path / "hf", datasets.load_from_disk(tmp_path / "hf"))):
        table = run(net, source, tmp_path / f"out{number}")
        torch.testing.assert_close(table.tensor("logits"), expected(net, photos, keys_in(photos)))


def test_texts_through_a_function_of_the_users(tmp_path: Path) -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 6)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.embed(ids) * mask[..., None]).sum(1)

    def load(path: str) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list(path.encode()))
        return {"ids": ids, "mask": torch.ones(len(ids))}

    texts = ["one", "three", "two", "fourteen", "six"]
    model = Text().eval()
    table = run(model, texts, tmp_path / "out", {"output": "text"}, load=load, transform=None)
    assert table.keys == texts
    for text, row in zip(texts, table, strict=True):
        inputs = {name: value[None] for name, value in load(text).items()}
        torch.testing.assert_close(row["text"], model(**inputs)[0].detach())


WRONG_SOURCES: dict[str, tuple[Any, type[Exception], str]] = {
    "not there": ("nowhere", featx.ExtractionError, "there is no 'nowhere'; samples come from a folder of images"),
    "a number": (3, featx.ArgumentTypeError, "samples come from .*; got a int"),
    "an empty list": ([], featx.ExtractionError, "there is nothing to extract in a list of 0 samples"),
    "one key twice": (["a.png", "b.png", "a.png"], featx.ExtractionError, "the key 'a.png' stands for two samples"),
    "nothing readable": (["a.png", "b.png"], featx.ExtractionError, "none of 2 samples .* can be read: 'a"),
}


@pytest.mark.parametrize("name", WRONG_SOURCES)
def test_a_wrong_source_is_refused(net: Net, tmp_path: Path, name: str) -> None:
    source, error, message = WRONG_SOURCES[name]
    with pytest.raises(error, match=message):
        run(net, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_folder_is_refused(net: Net, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(featx.ExtractionError, match=r"there is nothing to extract in the folder .* \(0 images\)"):
        run(net, tmp_path / "photos", tmp_path / "out")


def test_a_table_without_a_column_of_paths_is_refused(net: Net, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("a,b\n1,2\n")
    with pytest.raises(featx.ExtractionError, match="has the columns a, b; say which one, by column"):
        run(net, tmp_path / "list.csv", tmp_path / "out")


# -- images ---------------------------------------------------------------------------------------------------------


def _image(folder: Path, name: str, values: Any, mode: str | None = None, **options: Any) -> Path:
    image = Image.fromarray(values)
    (image.convert(mode) if mode else image).save(folder / name, **options)
    return folder / name


def test_images_of_every_kind(tmp_path: Path) -> None:
    ramp = np.tile(np.arange(20, dtype=np.uint8) * 12, (18, 1))
    color = np.stack([ramp, ramp // 2, ramp // 3], -1)
    plain = decode_image(_image(tmp_path, "rgb.png", color))
    assert np.array_equal(np.asarray(plain), color)
    grey = decode_image(_image(tmp_path, "grey.png", ramp))
    assert np.array_equal(np.asarray(grey), np.stack([ramp] * 3, -1))
    deep = decode_image(_image(tmp_path, "deep.png", ramp.astype(np.uint16) * 257))
    assert np.array_equal(np.asarray(deep), np.stack([ramp] * 3, -1))
    with_alpha = decode_image(_image(tmp_path, "alpha.png", color, "RGBA"))
    assert np.array_equal(np.asarray(with_alpha), color)
    cmyk = decode_image(_image(tmp_path, "cmyk.tif", color, "CMYK"))
    assert np.abs(np.asarray(cmyk).astype(int) - color).max() <= 2
    frames = [Image.fromarray(each) for each in (color, color[::-1].copy())]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:], lossless=True)
    assert np.array_equal(np.asarray(decode_image(tmp_path / "moving.webp")), color)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    turned = decode_image(_image(tmp_path, "turned.png", color, exif=exif))
    assert np.array_equal(np.asarray(turned), np.rot90(color, -1))


def test_what_cannot_be_read_fails_alone(net: Net, photos: Path, tmp_path: Path) -> None:
    (photos / "empty.png").write_bytes(b"")
    (photos / "text.png").write_text("no image")
    cut = (photos / "more" / "000.png").read_bytes()
    (photos / "cut.png").write_bytes(cut[: len(cut) // 2])
    table = run(net, photos, tmp_path / "out")
    assert {key for key, _ in table.errors} == {"empty.png", "text.png", "cut.png"}
    assert all(reason for _, reason in table.errors)
    assert len(table) == 20
    good = [key for key in keys_in(photos) if key not in dict(table.errors)]
    assert table.keys == good
    torch.testing.assert_close(table.tensor("logits"), expected(net, photos, good))
    assert featx.verify(tmp_path / "out").is_complete
    with pytest.raises(featx.ExtractionError, match=r"'empty.png' has no features: UnidentifiedImageError"):
        table.get("empty.png")


@pytest.mark.slow
def test_sample_of_a_data_set_is_found_by_its_number(tmp_path: Path) -> None:
    net, values = nn.Sequential(nn.Linear(4, 3)), torch.rand(5, 4)
    dataset = torch.utils.data.TensorDataset(values)
    table = featx.extract(net, {"0": "y"}, dataset, tmp_path / "out", transform=nn.Identity(), progress=False)
    torch.testing.assert_close(table.get(1)["y"], net(values)[1])
    torch.testing.assert_close(table.get("1")["y"], net(values)[1])


def test_array_of_images_says_what_the_transform_is_given(tmp_path: Path) -> None:
    net, images = nn.Sequential(nn.Conv2d(3, 4, 1)), np.zeros((3, 8, 8, 3), np.uint8)

    def transform(image: Any) -> torch.Tensor:
        return torch.tensor(image.getpixel((0, 0)))

    with pytest.raises(featx.ExtractionError, match=r"transform is given arrays; if it is for PIL images, give a list"):
        featx.extract(net, ["0"], images, tmp_path / "out", transform=transform, progress=False)


def test_a_huge_image_fails_alone(net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (400, 400)).save(photos / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    table = run(net, photos, tmp_path / "out")
    assert [key for key, reason in table.errors if "DecompressionBomb" in reason] == ["huge.png"]


def test_a_missing_file_fails_alone(net: Net, photos: Path, tmp_path: Path) -> None:
    paths = [*[photos / key for key in keys_in(photos)], photos / "gone.png"]
    table = run(net, paths, tmp_path / "out")
    assert [(Path(key).name, reason.partition(":")[0]) for key, reason in table.errors] == [
        ("gone.png", "FileNotFoundError")
    ]


def test_a_shard_with_nothing_but_failures(net: Net, photos: Path, tmp_path: Path) -> None:
    for number in range(8):
        (photos / f"z{number}.png").write_bytes(b"")
    table = run(net, photos, tmp_path / "out", rows_per_shard=4)
    assert len(table.errors) == 8
    assert len(table) == 20
    assert table.is_complete
    assert featx.verify(tmp_path / "out").is_complete


def test_a_batch_that_does_not_fit_into_memory_is_not_tried_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, tried = Net().eval(), list[int]()
    features, compute = Runner.features, Runner.compute
    is_full = False

    def limited(self: Runner, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if is_full:
            tried.append(len(batch))
            if len(batch) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return features(self, batch)

    def fill(self: Runner, numbers: Any, batch: torch.Tensor) -> Any:
        nonlocal is_full
        is_full = True  # other processes may take memory while a job runs
        return compute(self, numbers, batch)

    monkeypatch.setattr(Runner, "features", limited)
    monkeypatch.setattr(Runner, "compute", fill)
    table = run(net, photos, tmp_path / "out", batch_size=8)
    assert not table.errors
    torch.testing.assert_close(table.tensor("logits"), expected(net, photos, table.keys))
    assert [count for count in tried if count > 3] == [8, 4]  # in the first batch alone
    with pytest.raises(featx.ExtractionError, match="8 samples at once do not fit into the memory of cpu"):
        run(net, photos, tmp_path / "again", batch_size=8)


def test_a_batch_of_compiled_code_that_does_not_fit_is_filled_up_to_less(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return {"y": x * 2}

    runner = Runner(Doubled(), lambda images: images, torch.device("cpu"))
    x = torch.rand(8, 4)
    runner.set_columns({"y": x[:1]}, {"y": x[:2]})
    monkeypatch.setattr(runner, "_filled_to", 8)  # code was compiled for so many
    found, failed = runner.compute(range(8), x)
    assert not failed
    assert torch.equal(torch.cat([rows["y"] for _, rows in found]), x * 2)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_a_sample_for_which_the_model_raises_fails_alone(photos: Path, tmp_path: Path, batch_size: int) -> None:
    torch.manual_seed(0)
    marked = {keys_in(photos)[3], keys_in(photos)[12]}

    class Careful(Net):
        def __init__(self) -> None:
            super().__init__()
            self.check = _Refuses()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.check(x))

    for key in marked:
        Image.new("RGB", (20, 18), (255, 255, 255)).save(photos / key)
    net = Careful().eval()
    table = run(net, photos, tmp_path / "out", batch_size=batch_size)
    assert {key for key, _ in table.errors} == marked
    assert {reason for _, reason in table.errors} == {"ValueError: all white"}
    torch.testing.assert_close(table.tensor("logits"), expected(net, photos, table.keys))


class _Refuses(nn.Module):
    """Is kept whole by a trace, and raises for a white image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta and _is_white(x):
            raise ValueError("all white")
        return x


@featx.wrap
def _is_white(x: torch.Tensor) -> bool:
    return bool((x == 1).flatten(1).all(1).any())


def test_samples_of_another_size_fail_with_the_reason(net: Net, photos: Path, tmp_path: Path) -> None:
    def whole(image: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255

    Image.new("RGB", (40, 40)).save(photos / "large.png")
    table = run(net, photos, tmp_path / "maps", {"conv": "map"}, transform=whole)
    assert [(key, "pool it" in reason) for key, reason in table.errors] == [("large.png", True)]
    pooled = run(net, photos, tmp_path / "pooled", {"conv": Feature("map", pool="avg")}, transform=whole)
    assert pooled.errors == []


# -- what cannot be written -----------------------------------------------------------------------------------------

WRONG_NODES: dict[str, tuple[Any, type[Exception], str]] = {
    "bfloat16": ({"fc": Feature("a", dtype=torch.bfloat16)}, featx.ArgumentTypeError, "'a' is of torch.bfloat16"),
    "the key of keys": ({"fc": "key"}, featx.ArgumentTypeError, "a feature cannot be called 'key'"),
    "no rows": ({"fc": Feature("a", apply=torch.sum)}, featx.RequestError, "'a' has the shape .* so it has no row"),
    "a tuple": ({"fc": Feature("a", apply=lambda x: (x,))}, featx.RequestError, "'a' is a tuple and no tensor"),
    "no such node": ({"fd": "a"}, featx.NodeNameError, "No node 'fd' in Net"),
}


@pytest.mark.parametrize("name", WRONG_NODES)
def test_what_cannot_be_written_is_refused(net: Net, photos: Path, tmp_path: Path, name: str) -> None:
    nodes, error, message = WRONG_NODES[name]
    with pytest.raises(error, match=message):
        run(net, photos, tmp_path / "out", nodes)
    assert not (tmp_path / "out").exists()


def test_a_model_that_declares_no_transform_asks_for_one(net: Net, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(featx.ExtractionError, match=r"Net does not say how its images are made; give transform="):
        run(net, photos, tmp_path / "out", transform=None)


@pytest.mark.slow
def test_timms_transform_is_found(photos: Path, tmp_path: Path) -> None:
    import timm

    model = timm.create_model("resnet10t", num_classes=0).eval()
    table = run(model, photos, tmp_path / "out", {"output": "vector"}, transform=None, batch_size=1)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    with torch.no_grad():
        first = model(transform(Image.open(photos / table.keys[0]).convert("RGB"))[None])[0]
    assert torch.equal(table[0]["vector"], first)
    assert table.job.identity["transform"].startswith("timm's: Compose( Resize")


@pytest.mark.parametrize(("free", "trials"), [(7e6, 1), (1e12, 5)])
def test_the_batch_size_stays_within_memory(
    net: Net, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, trials: int
) -> None:
    tried: list[int] = []

    def seconds(runner: Any, example: Any, count: int) -> float:
        tried.append(count)
        return 1e-4 / count

    monkeypatch.setattr("featx.bulk.jobs.batch_size.seconds_of_sample", seconds)
    monkeypatch.setattr(
        "featx.bulk.jobs.batch_size.most_memory", lambda: 1e6 * len(tried)
    )  # each trial takes 1 MB more
    monkeypatch.setattr("featx.bulk.jobs.batch_size.free_memory", lambda: free)
    options: dict[str, Any] = {"transform": pixels, "workers": 0, "progress": False}
    table = featx.extract(net, {"fc": "logits"}, photos, tmp_path / "out", **options)
    assert tried == [1, 4, 16, 64, 256][:trials]
    assert table.job.recorded["batch_size"] == tried[-1]


def test_folders_behind_links_are_read_and_links_that_lead_back_are_not(net: Net, photos: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "class1").symlink_to(photos, target_is_directory=True)
    (linked / "again").symlink_to(photos, target_is_directory=True)
    (linked / "loop").symlink_to(linked, target_is_directory=True)
    keys = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    table = run(net, linked, tmp_path / "out")
    assert table.keys == [f"{name}/{key}" for name in ("again", "class1") for key in keys]
