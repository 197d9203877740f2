"""The pages in docs/ that are written by hand: links, file names, and the figures of the worked example."""

import re
from pathlib import Path

import pytest
import torch
import torchvision

import featx
from featx.features.building.tracing import ModelTracing
from featx.features.requests.request import as_request

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OVERVIEWS = "architecture tracing tracing-checks tracing-files node-meta passes limits glossary".split()
PAGES = [*(DOCS / f"{name}.md" for name in OVERVIEWS), *sorted((DOCS / "decisions").glob("*.md"))]
FOLDERS = ("featx", "tests", "examples", "benchmarks", "scripts")
TRACING = ROOT / "featx" / "tracing"


def id_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_linked_pages_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    names = set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", page.read_text(encoding="utf-8")))
    files = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert [name for name in names if not any(f"/{file}".endswith(f"/{name}") for file in files)] == []


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_page_is_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("path", sorted(TRACING.rglob("*.py")), ids=id_of)
def test_page_on_tracing_says_what_each_file_does(path: Path) -> None:
    lines = (DOCS / "tracing-files.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    assert path.name == "__init__.py" or any(f"`{path.name}`" in row for row in rows)


def test_worked_example_has_the_figures_and_lines_of_the_page() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    request = {"layer1.0.add": "sum", "layer2": "C3"}
    images = torch.rand(1, 3, 224, 224)
    model = torchvision.models.resnet50(weights=None)
    extractor = featx.create_feature_extractor(model, request, example_inputs=images)
    tracing = ModelTracing(model, example_inputs=images)
    traced = tracing.wanted(as_request(request, "return_nodes"), "train").graph
    tracing.drop()
    parameters = sum(parameter.numel() for parameter in extractor.parameters())
    figures = (
        f"{len(list(model.modules()))} modules",
        f"The graph has {len(traced.nodes)} nodes",
        f"{len(extractor.graph.nodes)} nodes are left",
        f"the {len(list(model.layer2.modules())) - 1} modules inside it",
        f"{len(list(extractor.modules()))} modules and {parameters / 1e6:.2f} of the",
    )
    text = " ".join(page.split())
    assert [figure for figure in figures if figure not in text] == []
    code = page.split("the generated lines", 1)[1].split("```")[1].removeprefix("text\n").splitlines()
    generated = [line.strip() for line in extractor.code.splitlines()]
    assert [line for line in code if line != "..." and line not in generated] == []
