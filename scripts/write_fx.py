"""Write featx/fx/ and the tables of docs/migration.md from featx/migration/table.py; run it after a change of that."""

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import featx
from featx.migration.table import MEMBERS, TABLE, names_here, said
from featx.migration.table import Path as Row

ROOT = Path(__file__).resolve().parent.parent
HEAD = '"""{about}\n\nWritten by scripts/write_fx.py from featx/migration/table.py, not by hand.\n"""\n\n'
PAGE = ROOT / "docs" / "migration.md"
# What stands above it in the page is written by hand.
MARK = "<!-- Written by scripts/write_fx.py from here on. -->\n"
COLUMNS = "| in torch.fx | here | what is otherwise, or why it is left out |\n|---|---|---|\n"
ABOUT_MEMBERS = "Every other public member of these classes is as there.\n\n"
GETATTR = "__getattr__ = explainer(__name__)\n"


def files() -> dict[Path, str]:
    """Return the text of each file of featx/fx/, by its path."""
    files: dict[Path, str] = {}
    for path, row in TABLE.items():
        place = ROOT.joinpath("featx", "fx", *path.split("."))
        inside = [other for other in TABLE if other and other.rpartition(".")[0] == path]
        file = place / "__init__.py" if inside or not path else place.with_suffix(".py")
        files[file] = module_text(path, row, [other.rpartition(".")[2] for other in inside])
    files[PAGE] = page()
    return files


def module_text(path: str, row: Row, submodules: list[str]) -> str:
    """Return the source of one module."""
    name = f"torch.fx.{path}" if path else "torch.fx"
    about = f"What {name} has, from where featx has it."
    if not row.here:
        everything = said(row.left_out).get("*")
        about = f"{name} is left out; its names say why." if everything else f"The package {name}."
    imports: dict[str, list[str]] = {"featx.migration.left_out": ["explainer"]}
    exported: list[str] = []
    for module, there, theirs in names_here(row):
        imports.setdefault(module, []).append(there if there == theirs else f"{there} as {theirs}")
        exported.append(theirs)
    lines = [HEAD.format(about=about), "from typing import TYPE_CHECKING\n\n"]
    lines += [import_text(module, names) for module, names in sorted(imports.items())]
    if exported:
        lines.append("\n__all__ = [\n" + "".join(f'    "{name}",\n' for name in sorted(exported, key=rank)) + "]\n")
    if not submodules:
        return "".join([*lines, "\nif not TYPE_CHECKING:\n    ", GETATTR])
    # Loaded when they are asked for, as attributes too.
    own = f"featx.fx.{path}" if path else "featx.fx"
    lines.append("\nif TYPE_CHECKING:\n")
    lines += [f"    from {own} import {module} as {module}\n" for module in sorted(submodules)]
    return "".join([*lines, "else:\n    ", GETATTR])


def import_text(module: str, names: list[str]) -> str:
    """Return the imports of `names` from `module`, as the formatter writes them."""
    plain = sorted([name for name in names if " as " not in name], key=lambda name: (rank(name)[0], name.lower()))
    groups = [[name] for name in names if " as " in name] + ([plain] if plain else [])
    lines: list[str] = []
    for group in sorted(groups, key=lambda group: rank(group[0])):
        line = f"from {module} import {', '.join(group)}\n"
        if len(line) > 121:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in group) + ")\n"
        lines.append(line)
    return "".join(lines)


def rank(name: str) -> tuple[int, str]:
    """Return a key that sorts names as the linter does: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def page() -> str:
    """Return the text of docs/migration.md: what was written by hand, and the table as tables."""
    by_hand = PAGE.read_text().partition(MARK)[0]
    seen: set[tuple[str, ...]] = set()
    names = "".join([line for path, row in TABLE.items() for line in name_lines(path, row, seen)])
    members = "".join([line for kind, row in MEMBERS.items() for line in member_lines(kind, row)])
    return f"{by_hand}{MARK}\n## Names\n\n{COLUMNS}{names}\n## Members\n\n{ABOUT_MEMBERS}{COLUMNS}{members}"


def name_lines(path: str, row: Row, seen: set[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines about one module of torch.fx, but for names that stood under another module already."""
    prefix = f"{path}." if path else ""
    otherwise = {name: text for other in TABLE.values() for name, text in said(other.otherwise).items()}
    otherwise.update(said(row.otherwise))
    for name in names_here(row):
        module, there, theirs = name
        if name not in seen:
            seen.add(name)
            yield f"| `{prefix}{theirs}` | `{public_name(module, there)}` | {otherwise.get(theirs, '')} |\n"
    for names, why in row.left_out.items():
        listed = ", ".join(f"`{prefix}{name}`" for name in names.split())
        if names == "*":
            listed = f"`{path}`" + (", all else" if row.here or len(row.left_out) > 1 else "")
        yield f"| {listed} | | {why} |\n"


def member_lines(kind: str, row: Row) -> Iterator[str]:
    """Yield the lines about the members of one class."""
    for is_here, about in ((True, row.otherwise), (False, row.left_out)):
        for names, text in about.items():
            listed = ", ".join(f"`{kind}.{name}`" for name in names.split())
            yield f"| {listed} | {'yes' if is_here else ''} | {text} |\n"


def public_name(module: str, name: str) -> str:
    """Return the name by which people import it: at the top level of featx, or else where it is defined."""
    is_public = getattr(featx, name, None) is getattr(importlib.import_module(module), name)
    return f"featx.{name}" if is_public else f"{module}.{name}"


if __name__ == "__main__":
    shutil.rmtree(ROOT / "featx" / "fx")
    for file, text in files().items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
