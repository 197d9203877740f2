"""`featx.fx` has torch.fx's module paths, in files written from the one table, and says why what is missing is."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.fx

import featx
import featx.fx
from featx.errors import LeftOutError, LeftOutImportError
from featx.migration.table import TABLE, TORCH, names_here, said

ROOT = Path(featx.__file__).parent.parent
IS_KNOWN_TORCH = torch.__version__.startswith(f"{TORCH}.")
NAMES = [(path, module, there, theirs) for path, row in TABLE.items() for module, there, theirs in names_here(row)]


def ours(path: str) -> ModuleType:
    return importlib.import_module(f"featx.fx.{path}".rstrip("."))


def script() -> Any:  # Any: a script is no package that pyright sees
    spec = importlib.util.spec_from_file_location("write_fx", ROOT / "scripts" / "write_fx.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_are_those_that_the_script_writes_from_the_table() -> None:
    written = script().files()
    there = set((ROOT / "featx" / "fx").rglob("*.py")) | {ROOT / "docs" / "migration.md"}
    assert there == set(written)
    assert [path for path, text in written.items() if path.read_text() != text] == []


@pytest.mark.parametrize(("path", "module", "there", "theirs"), NAMES)
def test_name_is_what_featx_defines(path: str, module: str, there: str, theirs: str) -> None:
    assert getattr(ours(path), theirs) is getattr(importlib.import_module(module), there)
    assert theirs in ours(path).__all__


def test_names_that_are_here_are_not_said_to_be_left_out() -> None:
    for path, row in TABLE.items():
        here = {theirs for _, _, theirs in names_here(row)}
        assert not here & set(said(row.left_out)), path
        assert set(said(row.otherwise)) <= here, path


def test_every_way_to_import() -> None:
    space: dict[str, Any] = {}
    exec(
        "import featx.fx as fx\n"
        "import featx.fx.passes.operator_support\n"
        "from featx import fx as again\n"
        "from featx.fx import Node, node\n"
        "from featx.fx.node import Node as same, map_arg\n"
        "from featx.fx.passes import operator_support\n"
        "from featx.fx.passes.utils import matcher_utils as matchers\n",
        space,
    )
    assert space["fx"] is space["again"] is featx.fx
    assert space["Node"] is space["same"] is space["node"].Node is featx.Node
    assert space["operator_support"] is featx.fx.passes.operator_support
    assert space["matchers"].SubgraphMatcher is featx.SubgraphMatcher


def test_star_import_gives_the_names_that_are_here() -> None:
    space: dict[str, Any] = {}
    exec("from featx.fx import *", space)
    assert {"Graph", "Node", "symbolic_trace", "wrap"} <= set(space)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_package_is_an_attribute_of_featx_as_torch_fx_is_of_torch() -> None:
    assert run("import featx; print(featx.fx.passes.shape_prop.ShapeProp is featx.ShapeProp)") == "True\n"


@pytest.mark.slow
def test_submodules_are_loaded_when_they_are_asked_for() -> None:
    assert run(
        "import sys, featx, featx.fx\n"
        "names = [name for name in sys.modules if name.startswith('featx.fx.')]\n"
        "featx.fx.passes.utils.matcher_utils.SubgraphMatcher\n"
        "print(names, 'featx.fx.passes.utils.matcher_utils' in sys.modules, 'featx.migration.table' in sys.modules)"
    ) == "[] True True\n"  # fmt: skip


@pytest.mark.slow
def test_torch_fx_is_not_needed() -> None:
    # `import torch` may load torch.fx itself, so each module of it is made to fail from then on.
    code = (
        "import sys, torch, importlib\n"
        "import featx\n"
        "for name in [name for name in sys.modules if name.split('.')[:2] == ['torch', 'fx']]:\n"
        "    sys.modules[name] = None\n"
        "from featx.migration.table import TABLE\n"
        "for path in TABLE:\n"
        "    importlib.import_module(f'featx.fx.{path}'.rstrip('.'))\n"
        "print('loaded')"
    )
    assert run(code) == "loaded\n"


def test_classes_are_pickled_under_their_own_names() -> None:
    assert pickle.loads(pickle.dumps(featx.fx.node.Node)) is featx.Node
    assert b"featx.fx" not in pickle.dumps(featx.fx.Graph)


def test_left_out_name_says_why_as_an_attribute() -> None:
    assert not hasattr(featx.fx, "CodeGen")
    with pytest.raises(LeftOutError, match=r"'CodeGen' of torch\.fx is not in featx\.fx: featx generates code"):
        featx.fx.CodeGen  # noqa: B018 - pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("from featx.fx import Graph, CodeGen", r"on_generate_code"),
        ("from featx.fx.experimental.proxy_tensor import make_fx", r"'make_fx' .* ATen operators"),
        ("from featx.fx._symbolic_trace import _Patcher as Patcher", r"'_Patcher' .* subclass featx\.Tracer"),
        ("from featx.fx.node import nonsense", r"'nonsense' .* docs/migration\.md"),
    ],
)
def test_left_out_name_says_why_when_it_is_imported(statement: str, message: str) -> None:
    with pytest.raises(LeftOutImportError, match=message):
        exec(statement)


def test_module_that_torch_fx_does_not_have_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"featx\.fx\.nonsense"):
        importlib.import_module("featx.fx.nonsense")


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_")]


def public_modules() -> list[str]:
    found = [info.name[len("torch.fx.") :] for info in pkgutil.walk_packages(torch.fx.__path__, "torch.fx.")]
    return ["", *(path for path in found if not any(part.startswith("_") for part in path.split(".")))]


@pytest.mark.skipif(not IS_KNOWN_TORCH, reason=f"the table is of torch {TORCH}")
def test_table_has_every_public_module_and_name_of_torch_fx() -> None:
    missing: list[str] = []
    for path in public_modules():
        if path.startswith(("experimental.unification.", "experimental.migrate_gradual_types.", "passes.tests")):
            continue  # parts of what is left out as a whole
        row = TABLE.get(path)
        if row is None:
            missing.append(path)
            continue
        known = {theirs for _, _, theirs in names_here(row)} | set(said(row.left_out))
        if "*" in known:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(f"torch.fx.{path}".rstrip("."))
        missing += [f"{path}.{name}" for name in public_names(module) if name not in known]
    assert missing == []


@pytest.mark.skipif(not IS_KNOWN_TORCH, reason=f"the table is of torch {TORCH}")
def test_table_has_no_path_that_torch_fx_has_not() -> None:
    assert [path for path in TABLE if importlib.util.find_spec(f"torch.fx.{path}".rstrip(".")) is None] == []
