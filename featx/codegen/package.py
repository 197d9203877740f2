"""Write generated code and the state it needs to a folder, as a package that can be imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from featx.errors import ArgumentTypeError
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


def write_package(module: nn.Module, graph: Graph, code: PythonCode, folder: Path, name: str) -> None:
    """Write `code`, which was made from `graph`, as class `name` to `folder`, with what it needs of `module` beside it.

    Raises:
        ArgumentTypeError: the code refers to an object that cannot be imported by name.
    """
    imports = ["import torch", "from math import inf, nan", "from torch import device", "NoneType = type(None)"]
    for alias, value in code.globals.items():
        if alias not in ("torch", "inf", "nan", "device", "NoneType"):
            imports += _import(alias, value)
    folder.mkdir(parents=True, exist_ok=True)
    keys = ("training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
    reads = {node.target.partition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    plain = {key: module.__dict__[key] for key in reads if key in module.__dict__}
    torch.save({**{key: module.__dict__[key] for key in keys}, **plain}, folder / "state.pt")
    body = "\n".join("    " + line if line.strip() else "" for line in code.src.split("\n")).rstrip()
    (folder / "module.py").write_text(_TEMPLATE.format(name=name, imports="\n".join(imports), code=body))
    (folder / "__init__.py").write_text(f"from .module import {name} as {name}\n")


def _import(alias: str, value: object) -> list[str]:
    if not callable(value):
        raise ArgumentTypeError(
            f"cannot write the global '{alias}' of the generated code: {value!r} has no import path"
        )
    path = qualified_name(value)
    owner, _, name = path.rpartition(".")
    if "<" in path or not owner:
        raise ArgumentTypeError(f"cannot write the global '{alias}' of the generated code: {path} cannot be imported")
    return [f"from {owner} import {name} as {alias}"]
