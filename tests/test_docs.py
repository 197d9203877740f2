"""The pages in docs/ that are written by hand: links, file names, and the figures of the worked example."""

import re
from pathlib import Path

import torch
import torchvision

import featx
from featx.features.building.requested import RequestedNodes
from featx.features.building.tracing import ModelTracing
from featx.features.building.tracing_options import TracingOptions
from featx.features.requests.request import as_request

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OVERVIEWS = "architecture tracing tracing-checks tracing-files node-meta passes limits glossary".split()
PAGES = [*(DOCS / f"{name}.md" for name in OVERVIEWS), *sorted((DOCS / "decisions").glob("*.md"))]
FOLDERS = ("featx", "tests", "examples", "benchmarks", "scripts")
TRACING = ROOT / "featx" / "tracing"


def id_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_linked_pages_exist() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#:]+)\)", text_of(page))]
    assert [(id_of(page), link) for page, link in links if not (page.parent / link).exists()] == []


def test_files_that_pages_name_exist() -> None:
    files = [f"/{path.relative_to(ROOT).as_posix()}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = {
        (id_of(page), file) for page in PAGES for file in re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", text_of(page))
    }
    assert [each for each in sorted(named) if not any(file.endswith(f"/{each[1]}") for file in files)] == []


def test_pages_are_short() -> None:
    lines = {id_of(page): text_of(page).splitlines() for page in PAGES}
    assert {page: len(found) for page, found in lines.items() if len(found) > 200} == {}
    assert {page: line for page, found in lines.items() for line in found if len(line) > 120} == {}


def test_page_on_tracing_says_what_each_file_does() -> None:
    rows = [line.split("|")[1] for line in text_of(DOCS / "tracing-files.md").splitlines() if line.startswith("| `")]
    files = {path.name for path in TRACING.rglob("*.py")} - {"__init__.py"}
    assert [file for file in sorted(files) if not any(f"`{file}`" in row for row in rows)] == []


def test_worked_example_has_the_figures_and_lines_of_the_page() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    request = {"layer1.0.add": "sum", "layer2": "C3"}
    images = torch.rand(1, 3, 224, 224)
    model = torchvision.models.resnet50(weights=None)
    extractor = featx.create_feature_extractor(model, request, example_inputs=images)
    tracing = ModelTracing(model, TracingOptions(example_inputs=images, makes_values=True))
    traced = RequestedNodes(tracing, "train").find(as_request(request, "return_nodes")).graph
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
