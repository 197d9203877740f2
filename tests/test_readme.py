import os
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


def code_blocks() -> list[tuple[int, str]]:
    """Return the Python blocks with the number of the line ahead of each."""
    text = README.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block.group(1)) for block in blocks]


def links() -> list[str]:
    return re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "source"), [pytest.param(*block, id=f"line-{block[0] + 1}") for block in code_blocks()]
)
def test_code_block_runs_on_its_own(line: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Padded, so that a traceback shows the line of the README.
    code = compile("\n" * line + source, str(README), "exec")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(code, {"__name__": "__main__"})
    assert os.listdir(tmp_path) == [], "a block of the README leaves files behind"


def test_there_are_code_blocks() -> None:
    assert len(code_blocks()) >= 8


@pytest.mark.parametrize("target", links())
def test_linked_file_exists(target: str) -> None:
    assert (README.parent / target).exists()
