"""Each block of code in the README and in the pages for users runs on its own, and each link leads somewhere."""

import os
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in "features backbones-guide coming-from toolkit recipes cli examples".split()
    ),
]


def code_blocks(page: Path) -> list[tuple[int, str]]:
    """Return the Python blocks with the number of the line before each."""
    text = page.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block.group(1)) for block in blocks]


BLOCKS = [(page, *block) for page in PAGES for block in code_blocks(page)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("page", "line", "source"), [pytest.param(*block, id=f"{block[0].stem}-{block[1] + 1}") for block in BLOCKS]
)
def test_code_block_runs_on_its_own(
    page: Path, line: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Padded, so that a traceback shows the line of the page.
    code = compile("\n" * line + source, str(page), "exec")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(code, {"__name__": "__main__"})
    assert os.listdir(tmp_path) == [], "a block leaves files behind"


def test_there_are_code_blocks() -> None:
    assert len(BLOCKS) >= 24


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_linked_files_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_is_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (130 if page.name == "README.md" else 220)
