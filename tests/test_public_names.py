"""The names of the package: where they are defined, and that they are imported when they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import featx


def names_for_type_checkers() -> dict[str, str]:
    """Return the names that a type checker sees, with the module of each."""
    source = Path(featx.__file__).read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: node.module
        for node in imports
        if node.module and node.module.startswith("featx.")
        for alias in node.names
    }


def test_names_are_those_that_type_checkers_see() -> None:
    assert names_for_type_checkers() == featx._HOMES
    assert sorted(featx._HOMES) == sorted(featx.__all__)


@pytest.mark.parametrize("name", featx.__all__)
def test_name_is_there(name: str) -> None:
    value = getattr(featx, name)
    home = sys.modules[featx._HOMES[name]]
    assert value is getattr(home, name)
    assert name in dir(featx)


@pytest.mark.slow
def test_importing_the_package_imports_nothing_else() -> None:
    code = """
import sys
import featx
assert sorted(name for name in sys.modules if name.partition(".")[0] in ("featx", "torch")) == ["featx"]
assert featx.draw.__name__ == "draw"
assert featx.passes.remove_dropout and featx.errors.FeatxError is featx.FeatxError
assert not hasattr(featx, "nothing") and not hasattr(featx, "not.there") and not hasattr(featx, "__wrapped__")
from featx import *
assert create_feature_extractor is featx.create_feature_extractor
"""
    subprocess.run([sys.executable, "-c", code], check=True)
