"""Write generated code and the state it needs to a folder, as a package that can be imported."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from featx.codegen.emit import ALWAYS_KNOWN
from featx.codegen.identifiers import is_dotted_name
from featx.containers import plain_parts
from featx.errors import ArgumentTypeError
from featx.ir.identifiers import is_plain
from featx.ir.names import qualified_name

if TYPE_CHECKING:
    from torch import nn

    from featx.codegen.emit import PythonCode
    from featx.ir.graph import Graph

_TEMPLATE = '''"""Written by featx: {name} as plain PyTorch code."""

from pathlib import Path

{imports}


class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # The file holds whole modules, so it is loaded with pickle: load only what you trust.
        state = torch.load(Path(__file__).with_name("state.pt"), weights_only=False)
        self.__dict__.update(state)
{code}
'''
# A name in a class body that starts with two underscores is read as one with the class's name before it.
PRIVATE = re.compile(r"\b__\w*(?<!__)\b")


def write_package(module: nn.Module, graph: Graph, code: PythonCode, folder: Path, name: str) -> None:
    """Write `code`, which was made from `graph`, as class `name` to `folder`, with what it needs of `module` beside it.

    Raises:
        ArgumentTypeError: the code refers to an object that cannot be imported by name, or `name` cannot name a class.
    """
    check_class_name(name, {*code.globals, "Path"})
    imports = ["import torch", "from math import inf, nan", "from torch import device", "NoneType = type(None)"]
    for alias, value in code.globals.items():
        if alias not in ALWAYS_KNOWN:
            imports += lines_of_import(alias, value)
    folder.mkdir(parents=True, exist_ok=True)
    keys = ("training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
    reads = {node.target.partition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    state = {key: module.__dict__[key] for key in (*keys, *reads) if key in module.__dict__}
    state["_modules"] = plain_parts(module)
    torch.save(state, folder / "state.pt")
    is_private = PRIVATE.search(code.src) is not None
    indent = "" if is_private else "    "
    body = "\n".join(indent + line if line.strip() else "" for line in code.src.split("\n")).rstrip()
    if is_private:
        body += f"\n\n\n{name}.forward = forward"
    text = _TEMPLATE.format(name=name, imports="\n".join(imports), code=body)
    (folder / "module.py").write_text(text, encoding="utf-8")
    (folder / "__init__.py").write_text(f"from .module import {name} as {name}\n", encoding="utf-8")


def check_class_name(name: str, taken: Collection[str]) -> None:
    """Raise ArgumentTypeError unless generated code, which uses the names `taken`, can have a class of this name."""
    if not is_plain(name) or name in taken or hasattr(builtins, name):
        raise ArgumentTypeError(f"cannot write a class named {name!r}; choose an identifier that the code does not use")


def lines_of_import(alias: str, value: object) -> list[str]:
    """Return the lines that import a global of generated code by the name `alias`.

    Raises:
        ArgumentTypeError: it cannot be imported by name.
    """
    if not callable(value):
        raise ArgumentTypeError(
            f"cannot write the global '{alias}' of the generated code: {value!r} has no import path"
        )
    path = qualified_name(value)
    if not is_dotted_name(path):
        raise ArgumentTypeError(f"cannot write the global '{alias}' of the generated code: {path} cannot be imported")
    owner, _, name = path.rpartition(".")
    owner = owner or builtins.__name__
    holder = sys.modules.get(owner)
    outer, _, class_name = owner.rpartition(".")
    if holder is None and outer in sys.modules:  # `apply` of a class
        holder = getattr(sys.modules[outer], class_name, None)
    if holder is not None and getattr(holder, name, None) != value:
        raise ArgumentTypeError(
            f"cannot write the global '{alias}' of the generated code: {path} is another object; "
            "define it there under that name"
        )
    if isinstance(holder, type):
        return [f"from {outer} import {class_name} as {alias}", f"{alias} = {alias}.{name}"]
    return [f"from {owner} import {name} as {alias}"]
