"""Files of features are read by datasets, polars, DuckDB, pyarrow and faiss, as their users read files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featx
from featx import Feature

from .conftest import Net
from .test_resume import run


@pytest.fixture
def vectors(net: Net, photos: Path, tmp_path: Path) -> featx.FeatureTable:
    nodes = {"fc": "logits", "conv": Feature("pooled", pool="avg", dtype=torch.float16)}
    return run(net, photos, tmp_path / "vectors", nodes)


@pytest.fixture
def maps(net: Net, photos: Path, tmp_path: Path) -> featx.FeatureTable:
    return run(net, photos, tmp_path / "maps", {"conv": "map"})


def test_polars(vectors: featx.FeatureTable) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(vectors.paths)
    assert frame["key"].to_list() == vectors.keys
    assert np.array_equal(frame["logits"].to_numpy(), vectors.tensor("logits").numpy())
    assert np.array_equal(frame["pooled"].to_numpy().astype(np.float16), vectors.tensor("pooled").numpy())


def test_polars_reads_a_pattern(vectors: featx.FeatureTable, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    assert polars.read_parquet(f"{tmp_path}/vectors/*.parquet")["key"].to_list() == vectors.keys


@pytest.mark.slow
def test_duckdb_compares_vectors(vectors: featx.FeatureTable, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    page = (Path(__file__).parents[2] / "docs" / "bulk.md").read_text()
    query = page.split('duckdb.sql("""')[1].split('"""')[0]
    for name, value in {
        "C5::FLOAT[2048]": "logits::FLOAT[5]", "features/": f"{tmp_path}/vectors/", "a/b.jpg": vectors.keys[3],
    }.items():  # fmt: skip
        assert name in query
        query = query.replace(name, value)
    values = vectors.tensor("logits")
    distances = 1 - torch.cosine_similarity(values, values[3:4])
    found = duckdb.sql(query).fetchall()
    assert [key for key, _ in found] == [vectors.keys[place] for place in distances.argsort()[:10]]
    assert np.allclose([distance for _, distance in found], distances.sort().values[:10].numpy(), atol=1e-6)


@pytest.mark.slow
def test_duckdb(vectors: featx.FeatureTable) -> None:
    duckdb = pytest.importorskip("duckdb")
    rows = duckdb.sql(f"select key, logits from read_parquet({vectors.paths!r}) order by key").fetchall()
    order = sorted(range(len(vectors)), key=vectors.keys.__getitem__)
    assert [key for key, _ in rows] == sorted(vectors.keys)
    assert np.allclose([values for _, values in rows], vectors.tensor("logits")[order].numpy(), atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_datasets(vectors: featx.FeatureTable, maps: featx.FeatureTable, kind: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table, name = (vectors, "logits") if kind == "parquet" else (maps, "map")
    found = datasets.load_dataset(kind, data_files=table.paths, split="train", cache_dir=str(tmp_path / "cache"))
    assert found["key"][:] == table.keys
    values = np.stack([np.asarray(each, dtype=np.float32) for each in found[name]])
    assert np.array_equal(values, table.tensor(name).flatten(1).numpy())


def test_pyarrow_maps_arrow_files(maps: featx.FeatureTable) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    dataset = pytest.importorskip("pyarrow.dataset")
    found = dataset.dataset(maps.paths, format="arrow").to_table()
    assert found.column("key").to_pylist() == maps.keys
    assert found.schema.field("map").metadata == {b"shape": b"[4, 7, 7]"}
    before = arrow.total_allocated_bytes()
    mapped = arrow.ipc.open_file(arrow.memory_map(maps.paths[0])).read_all()
    assert arrow.total_allocated_bytes() - before < mapped.nbytes / 4  # the values stay on disk


def test_faiss(vectors: featx.FeatureTable) -> None:
    faiss = pytest.importorskip("faiss")
    values = vectors.tensor("logits").numpy()
    index = faiss.IndexFlatL2(values.shape[1])
    index.add(values)
    distances, nearest = index.search(values, 2)
    by_hand = ((values[:, None] - values[None]) ** 2).sum(-1)
    assert np.array_equal(nearest[:, 0], np.arange(len(values)))
    assert np.array_equal(nearest[:, 1], by_hand.argsort(1)[:, 1])
    assert np.allclose(distances[:, 1], np.sort(by_hand, 1)[:, 1], atol=1e-5)


@pytest.mark.slow
def test_a_torch_data_loader(vectors: featx.FeatureTable) -> None:
    loader = torch.utils.data.DataLoader(vectors, batch_size=7, shuffle=True, num_workers=2)
    found: dict[str, torch.Tensor] = {}
    for batch in loader:
        found.update(zip(batch["key"], batch["logits"], strict=True))
    assert sorted(found) == sorted(vectors.keys)
    assert torch.equal(torch.stack([found[key] for key in vectors.keys]), vectors.tensor("logits"))
