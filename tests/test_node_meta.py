"""docs/node-meta.md has each key of node.meta that the code reads or writes, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import featx
from featx.passes.partial_copy import _OF_THE_NODE

ROOT = Path(featx.__file__).parent
PAGE = ROOT.parent / "docs" / "node-meta.md"
# Of the meta of modules, which is another dict.
OF_MODULES = {"free_dims", "feature_info", "example", "frozen_norms", "frozen_parameters", "opened_norms"}


def is_meta(node: ast.expr) -> bool:
    """Say whether an expression is a `meta`: a name or an attribute that is called so."""
    return (isinstance(node, ast.Name) and node.id == "meta") or (
        isinstance(node, ast.Attribute) and node.attr == "meta"
    )


def keys_in(tree: ast.AST) -> Iterator[str]:
    """Yield the literal keys with which code reads, writes or asks a `meta`."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and is_meta(node.value):
            found = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            found = node.args[:1] if node.func.attr in ("get", "pop", "setdefault") else []
        elif isinstance(node, ast.Compare) and any(map(is_meta, node.comparators)):
            found = [node.left]
        yield from (each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str))


def listed() -> set[str]:
    """Return the keys of the page."""
    rows = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def test_page_has_the_keys_of_the_code() -> None:
    used = {
        key
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] != "fx"
        for key in keys_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert used - OF_MODULES == listed()


def test_keys_that_are_true_of_a_node_alone_are_on_the_page() -> None:
    assert listed() >= _OF_THE_NODE


def test_keys_are_found() -> None:
    source = 'node.meta["a"] = 1; node.meta.get("b"); "c" in meta; meta.pop("d", None); meta[key]; other["e"]'
    assert set(keys_in(ast.parse(source))) == {"a", "b", "c", "d"}
