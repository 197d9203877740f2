"""Load code that is written against torch.fx twice: as it is, and with `torch.fx` replaced by `featx.fx`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

CODE = Path(__file__).parent / "code"


def load(stem: str, package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a file of `code/` with `torch.fx` replaced by `package`, from a copy in `folder`."""
    text = (CODE / f"{stem}.py").read_text().replace("torch.fx", package)
    top = package.partition(".")[0]
    file = folder / f"{top}_{stem}.py"
    file.write_text(text.replace("from torch import fx, nn", f"from {top} import fx\nfrom torch import nn"))
    spec = importlib.util.spec_from_file_location(stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, stem, module)
    spec.loader.exec_module(module)
    return module
