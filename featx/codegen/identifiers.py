"""Turn names and texts that a graph holds into Python source that reads exactly these names and texts.

Everything that a graph names gets into generated code through one of these functions, or, as a variable, through
`Namespace.create_name`: as an identifier where Python reads it as that, in quotes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from featx.errors import GraphError
from featx.ir.identifiers import is_plain, plain_text
from featx.ir.names import CODE_GLOBALS


def quoted(text: str) -> str:
    """Return an expression for `text`: a string literal without line breaks, NUL characters or surrogates in it."""
    return str.__repr__(text)


def attribute(owner: str, name: str, name_of_builtin: Callable[[str], str] = str) -> str:
    """Return an expression for an attribute of `owner`, whatever its name; see `around_owner`."""
    before, after = around_owner(name, name_of_builtin)
    return f"{before}{owner}{after}"


def around_owner(name: str, name_of_builtin: Callable[[str], str] = str) -> tuple[str, str]:
    """Return what stands before an owner and after it in the expression for its attribute of any `name`.

    `name_of_builtin` gives the expression for `getattr`, which an input may hide.
    """
    name = plain_text(name)
    if is_plain(name):
        return "", f".{name}"
    # As torch.fx writes it, where that is the same text.
    text = f'"{name}"' if is_literal_text(name) else quoted(name)
    return f"{name_of_builtin('getattr')}(", f", {text})"


def is_literal_text(text: str) -> bool:
    """Say whether `text` between double quotes is a string literal of exactly this text."""
    return text.isprintable() and '"' not in text and "\\" not in text


def keyword_argument(key: str, value: str) -> str:
    """Return the argument of a call that passes the expression `value` under the keyword `key`, whatever that is."""
    key = plain_text(key)
    return f"{key} = {value}" if is_plain(key) else f"**{{{quoted(key)}: {value}}}"


def is_dotted_name(name: str) -> bool:
    """Say whether `name` is an expression that reads an attribute of an attribute... of a variable, and no more."""
    return all(is_plain(part) for part in plain_text(name).split("."))


def comment(text: str) -> str:
    """Return the first line of `text` as a comment, with characters that cannot be printed written as escapes."""
    lines = plain_text(text).splitlines() or [""]
    line = lines[0].strip()
    return f"# {line if line.isprintable() else quoted(line)[1:-1]}"


def check_root(name: str) -> str:
    """Return the name by which the code calls the module, as a plain string.

    Raises:
        GraphError: it is no identifier, or one that the code uses for something else.
    """
    root = plain_text(name)
    if not is_plain(root) or root in CODE_GLOBALS:
        raise GraphError(f"the generated code cannot call its module {root!r}; choose another identifier for it")
    return root
