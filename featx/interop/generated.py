"""Edit and check the source that torch.fx generates."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from typing import Any

from torch.fx.graph import CodeGen

from featx.ir.names import CODE_GLOBALS


def put_modes_back(body: list[str]) -> list[str]:
    """Let the code put back gradient mode and autocast whatever happens in it, as featx's does."""
    text = "".join(body).rstrip("\n")
    suffix = "_mode"
    while f"{suffix} " in text:
        suffix += "_"
    # In a variable of its own, as torch.fx's code forgets that of a region that nothing leaves.
    text, regions = _ENTERS.sub(rf"\1{suffix} = \1 = \2", text), _ENTERS.findall(text)
    text = _LEAVES.sub(rf"\1;  \2{suffix} = None", text)
    names = [f"{name}{suffix}" for name, _ in regions]
    start = [f"gradient{suffix} = torch.is_grad_enabled()", *[f"{name} = None" for name in names], "try:"]
    end = ["finally:", f"    torch._C._set_grad_enabled(gradient{suffix})"]
    end += [f"    if {name} is not None: torch.amp.autocast_mode._exit_autocast({name})" for name in reversed(names)]
    return ["\n".join([*start, *["    " + line for line in text.split("\n")], *end, ""])]


# At the start of a line: a string in an argument may hold the same text.
_ENTERS = re.compile(r"^(\w+)(?: : [^=\n]+)? = (torch\.amp\.autocast_mode\._enter_autocast\()", re.MULTILINE)
_LEAVES = re.compile(r"^(\w+(?: : [^=\n]+)? = torch\.amp\.autocast_mode\._exit_autocast\((\w+)\))", re.MULTILINE)


def hidden_name(source: str, inputs: Mapping[str, str]) -> str | None:
    """Return an input of which the code uses the name for something else, if there is one.

    `inputs` maps the names in the signature to those of the nodes. torch.fx's code gives an input another name in its
    first lines where the two differ, or the name is a builtin's. It then forgets that the name in the signature is
    taken: `def forward(self, len): len_1 = len; ... len(x)`. O(length of the source).
    """
    uses: dict[str, list[ast.Name]] = {
        name: [] for name, node in inputs.items() if name != node or hasattr(builtins, name) or name in CODE_GLOBALS
    }
    for item in ast.walk(ast.parse(source)) if uses else ():
        if isinstance(item, ast.Name) and item.id in uses:
            uses[item.id].append(item)
    for name, found in uses.items():
        found.sort(key=lambda use: (use.lineno, use.col_offset))
        is_read_first = isinstance(found[0].ctx, ast.Load)
        is_assigned_next = len(found) == 1 or isinstance(found[1].ctx, ast.Store)
        if not (is_read_first and is_assigned_next):
            return name
    return None


class KeywordOnlyCode(CodeGen):
    """torch.fx's code with keyword-only inputs."""

    def __init__(self, keyword_only: frozenset[str]) -> None:
        super().__init__()
        self._keyword_only = keyword_only

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """Return the line that begins the function."""
        for position, variable in enumerate(free_vars):
            if variable.startswith("*"):
                break
            if re.split(r"\W", variable, maxsplit=1)[0] in self._keyword_only:
                free_vars.insert(position, "*")
                break
        return super().gen_fn_def(free_vars, maybe_return_annotation, **options)
