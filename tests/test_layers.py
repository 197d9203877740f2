"""Which file of featx may import which, read from the syntax trees. Each rule is one test of all files."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import featx

ROOT = Path(featx.__file__).parent
# A file imports only from layers before its own, and from its own package; packages that share a layer do not import
# each other, except the files at the bottom.
LAYERS = [
    {"checksums", "containers", "errors", "examples", "libraries", "plotting", "rebuilding", "saved_tensor", "tree"},
    {"ir"}, {"codegen", "tracing"}, {"fingerprint", "shared_attributes"}, {"module"}, {"traced"},
    {"interpret", "rewrite"}, {"passes"}, {"interop"}, {"features"}, {"drawing"}, {"optimization"}, {"bulk"},
    {"cli"}, {"__main__"}, {"migration"}, {"fx"},
]  # fmt: skip
PLACE = {package: place for place, layer in enumerate(LAYERS) for package in layer}
# The rooms of a package and the files beside them, in the same way.
ROOMS_OF_TRACING = [
    {"objects", "log"}, {"source"}, {"source_writes", "source_uses"}, {"signals"}, {"nodes"}, {"guards"},
    {"environment"}, {"file_globals"}, {"stand_ins"}, {"model_state"}, {"replica"}, {"history"},
    {"symbolic", "recording"}, {"side_effects"}, {"calls"}, {"inputs"}, {"example"}, {"sizes"}, {"freedom"}, {"checks"},
]  # fmt: skip
ROOMS_OF_BULK = [{"extras"}, {"storage"}, {"samples"}, {"jobs"}, {"table"}, {"extract"}]
PLACE_OF_ROOM = {
    (package, room): place
    for package, order in (("tracing", ROOMS_OF_TRACING), ("bulk", ROOMS_OF_BULK))
    for place, rooms in enumerate(order)
    for room in rooms
}
# Graph.python_code is torch.fx's surface: code asks the graph for its code.
UPWARDS = {("ir/graph.py", "featx.codegen.emit")}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def faults_in(paths: Iterable[Path], rule: Callable[[Path, ast.Module], list[str]]) -> dict[str, list[str]]:
    """Return what a rule finds in each file in which it finds something."""
    found = {name(path): rule(path, parsed(path)) for path in paths}
    return {path: faults for path, faults in found.items() if faults}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST, at_import: bool = True) -> Iterator[tuple[str, list[str], bool]]:
    """Yield each imported module, the names taken from it, and whether the import runs when the file is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names], at_import
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, [], at_import
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            is_checked_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            is_later = is_checked_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(node, at_import and not is_later)


def room_of(module: str, package: str) -> str | None:
    """Return the room of a module of a package, or its own name if it is in none; None for the package itself."""
    return module.split(".")[2] if module.startswith(f"featx.{package}.") else None


def faults_of_room(path: Path, tree: ast.AST) -> list[str]:
    """Return what a file of a package with rooms imports from a room beside its own or after it."""
    package = package_of(path)
    own = room_of("featx." + name(path).removesuffix(".py").replace("/", "."), package)
    others = [(module, room_of(module, package)) for module, _, _ in imports(tree)]
    return [
        module
        for module, room in others
        if own is not None and room not in (None, own) and PLACE_OF_ROOM[package, room] >= PLACE_OF_ROOM[package, own]
    ]


def faults(path: Path, tree: ast.AST) -> list[str]:
    """Return what a file imports that stands beside it or after it."""
    own = package_of(path)
    found: list[str] = []
    for module, names, at_import in imports(tree):
        if module == "featx" and own != "cli":  # which asks for names that are imported when they are used
            found.append(f"{module}: import {names} from where they are defined")
        if not module.startswith("featx."):
            continue
        other = module.split(".")[1]
        is_before = PLACE[other] < PLACE[own] or other == own or {own, other} <= LAYERS[0]
        if not is_before and (at_import or (name(path), module) not in UPWARDS):
            found.append(module)
    return found


def test_every_file_has_a_place_among_the_layers() -> None:
    assert [name(path) for path in FILES if package_of(path) not in PLACE] == []


@pytest.mark.slow
def test_files_import_only_from_what_stands_before_them() -> None:
    assert faults_in(FILES, faults) == {}


TRACING = [path for path in FILES if package_of(path) == "tracing" and path != ROOT / "tracing/__init__.py"]


def test_files_of_tracing_import_only_from_rooms_before_their_own() -> None:
    assert faults_in(TRACING, faults_of_room) == {}


def test_files_of_bulk_import_only_from_rooms_before_their_own() -> None:
    files = [path for path in FILES if package_of(path) == "bulk" and path != ROOT / "bulk/__init__.py"]
    assert faults_in(files, faults_of_room) == {}


def test_rule_of_rooms_finds_what_it_should() -> None:
    upwards, lazily = "from featx.tracing.calls.x import f", "def f():\n    import featx.tracing.checks.x"
    aside, own = "import featx.tracing.symbolic.x", "from featx.tracing.recording.y import f"
    source = "\n".join([upwards, lazily, aside, own, "import featx.tracing.source.x", "import featx.ir.node"])
    found = faults_of_room(ROOT / "tracing/recording/x.py", ast.parse(source))
    assert sorted(found) == ["featx.tracing.calls.x", "featx.tracing.checks.x", "featx.tracing.symbolic.x"]
    found = faults_of_room(ROOT / "bulk/samples/x.py", ast.parse("import featx.bulk.jobs.x, featx.bulk.storage.x"))
    assert found == ["featx.bulk.jobs.x"]


def test_page_on_tracing_has_the_rooms_in_the_order_of_their_imports() -> None:
    page = (ROOT.parent / "docs/tracing-files.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| \*\*`(\w+)/`", page, re.MULTILINE)
    folders = {path.parent.name for path in TRACING} - {"tracing"}
    assert set(rooms) == folders
    assert rooms == sorted(rooms, key=lambda room: PLACE_OF_ROOM["tracing", room])


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("ir/node.py", "from featx.codegen.emit import emit", ["featx.codegen.emit"]),
        ("ir/node.py", "def f():\n    from featx.codegen.emit import emit", ["featx.codegen.emit"]),
        ("ir/graph.py", "from featx.codegen.emit import emit", ["featx.codegen.emit"]),
        ("ir/graph.py", "def f():\n    from featx.codegen.emit import emit", []),
        ("ir/graph.py", "if TYPE_CHECKING:\n    from featx.codegen.emit import emit", []),
        ("ir/graph.py", "def f():\n    import featx.module", ["featx.module"]),
        ("codegen/emit.py", "import featx.tracing.nodes.proxy", ["featx.tracing.nodes.proxy"]),
        ("tracing/proxy.py", "from featx.codegen.emit import emit", ["featx.codegen.emit"]),
        ("tree.py", "from featx.errors import FeatxError", []),
        (
            "features/nodes.py",
            "from featx.module import GraphModule\nfrom featx.features.building.tracing import f",
            [],
        ),
        ("module.py", "from featx import Graph", ["featx: import ['Graph'] from where they are defined"]),
    ],
)
def test_rule_finds_what_it_should(file: str, source: str, expected: list[str]) -> None:
    assert faults(ROOT / file, ast.parse(source)) == expected


# The part of torch's fake tensors that knows sizes which depend on values. It has nothing to do with graphs.
UNKNOWN_SIZES = "torch.fx.experimental.symbolic_shapes"


def uses_torch_fx(tree: ast.AST) -> bool:
    """Say whether code imports torch.fx or takes it from torch, wherever in the file."""
    imported = any(
        (f"{module}.".startswith("torch.fx.") or (module == "torch" and "fx" in names)) and module != UNKNOWN_SIZES
        for module, names, _ in imports(tree)
    )
    return imported or any(
        isinstance(node, ast.Attribute) and node.attr == "fx" and ast.unparse(node) == "torch.fx"
        for node in ast.walk(tree)
    )


@pytest.mark.slow
def test_one_folder_uses_torch_fx() -> None:
    files = [*FILES, ROOT / "__init__.py"]
    users = [name(path) for path in files if uses_torch_fx(parsed(path))]
    assert "interop/torch_fx.py" in users
    assert all(path.startswith("interop/") for path in users)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.fx", True),
        ("import torch.fx.passes as passes", True),
        ("from torch import fx", True),
        ("from torch.fx import Graph", True),
        ("def f():\n    from torch.fx.node import Node", True),
        ("if TYPE_CHECKING:\n    import torch.fx", True),
        ("import torch\ndef f():\n    return torch.fx.Graph()", True),
        ("import torch.fxx", False),
        ("from torch.fx.experimental.symbolic_shapes import ShapeEnv", False),
        ("import torch\n'torch.fx'", False),
    ],
)
def test_uses_of_torch_fx_are_found(source: str, expected: bool) -> None:
    assert uses_torch_fx(ast.parse(source)) is expected


def private_names(path: Path, tree: ast.Module) -> list[str]:
    """Return the private names that a file imports."""
    taken = [
        f"{module}.{name}"
        for module, names, _ in imports(tree)
        for name in names
        if not module.startswith("featx.fx")  # which has modules under torch.fx's private names
    ]
    return [dotted for dotted in taken if dotted.rpartition(".")[2].startswith("_")]


@pytest.mark.slow
def test_files_import_no_private_names() -> None:
    assert faults_in(FILES, private_names) == {}


WRITERS = {"append", "add", "update", "pop", "clear", "setdefault", "extend", "insert", "remove", "discard"}


def state_at_module_level(path: Path, tree: ast.Module) -> list[str]:
    """Return what makes names at module level more than constants, types and functions, or writes one of them."""
    constants: set[str] = set()
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
        constants.update(target.id for target in targets if isinstance(target, ast.Name))
    found = [constant for constant in constants if constant.islower() and not constant.startswith("__")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(ast.unparse(node))
        if isinstance(node, ast.FunctionDef):
            found += [ast.unparse(each) for each in ast.walk(node) if writes_one_of(each, constants)]
    return found


def writes_one_of(node: ast.AST, names: set[str]) -> bool:
    is_item = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    is_writer = isinstance(node, ast.Attribute) and node.attr in WRITERS
    return (is_item or is_writer) and isinstance(node.value, ast.Name) and node.value.id in names


@pytest.mark.slow
def test_files_keep_no_state_at_module_level() -> None:
    assert faults_in(FILES, state_at_module_level) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("seen = []", 1),
        ("def f():\n    global SEEN", 1),
        ("SEEN = []\ndef f():\n    SEEN.append(1)", 1),
        ("SEEN = {}\ndef f():\n    SEEN[1] = 2\n    del SEEN[2]", 2),
        ("SEEN = {}\ndef f(own):\n    own[1] = SEEN[2]\n    own.append(1)", 0),
        ("from featx.ir.node import _hidden", 1),
        ("from featx.ir.node import Node", 0),
    ],
)
def test_rules_of_state_and_private_names_find_what_they_should(source: str, count: int) -> None:
    rules = (state_at_module_level, private_names)
    assert sum(len(rule(ROOT / "ir/node.py", ast.parse(source))) for rule in rules) == count
