"""Code as it stands in code bases that use torch.fx gives the same with `torch.fx` replaced by `featx.fx`.

Each function `case_...` of the files in `code/` is run with both, and what it returns is compared.
"""

from __future__ import annotations

import ast
import pprint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fx.conftest import CODE, load

CASES = [
    (file.stem, function.name)
    for file in sorted(CODE.glob("*.py"))
    for function in ast.parse(file.read_text()).body
    if isinstance(function, ast.FunctionDef) and function.name.startswith("case_")
]


def plain(value: Any) -> Any:
    """Return what two results are compared by: values of tensors, names of nodes and classes, and structure."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.detach().tolist()
    if kind.__name__ == "Node":
        return "node", value.name
    if kind.__name__ == "Graph":
        return "graph", str(value)
    if isinstance(value, nn.Module):
        return "module", type(value).__name__
    if isinstance(value, type):
        return "class", value.__name__
    if isinstance(value, dict):
        return [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return "tuple" if isinstance(value, tuple) else "list", [plain(item) for item in value]
    if callable(value):
        return "function", getattr(value, "__name__", repr(value))
    return value


@pytest.mark.parametrize(("stem", "case"), CASES, ids=[f"{stem}-{case[5:]}" for stem, case in CASES])
def test_same_code_gives_the_same(stem: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(getattr(load(stem, "torch.fx", tmp_path, monkeypatch), case)())
    found = plain(getattr(load(stem, "featx.fx", tmp_path, monkeypatch), case)())
    assert expected is not None
    assert pprint.pformat(found, width=100) == pprint.pformat(expected, width=100)
