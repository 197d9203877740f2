"""Turn dotted module paths into expressions, and choose which shared prefixes get a local variable.

`self.layer1` is a dictionary search through `nn.Module.__getattr__`. A chain of them for each call costs more than
small layers do, so the code fetches a prefix once where more than one path goes through it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from keyword import iskeyword


class ModulePaths:
    """Expressions for the module paths of one graph.

    `create_name` gives a free variable name for a prefix. O(paths * depth) to build.
    """

    def __init__(self, root: str, paths: Iterable[str], create_name: Callable[[str], str]) -> None:
        self._root = root
        self._create_name = create_name
        self._variables: dict[str, str] = {}
        branches: defaultdict[str, int] = defaultdict(int)
        seen: set[str] = set()
        for path in paths:
            prefix = path
            while "." in prefix:
                prefix = prefix.rpartition(".")[0]
                branches[prefix] += 1
                if prefix in seen:
                    break
                seen.add(prefix)
        self._shared = {prefix for prefix, count in branches.items() if count > 1}

    def expression(self, path: str, statements: list[str]) -> str:
        """Return an expression for the module or attribute at `path`.

        Assignments of prefixes that it needs and that the code has not made yet are appended to `statements`.
        """
        prefix, _, last = path.rpartition(".")
        return attribute(self._prefix(prefix, statements), last)

    def _prefix(self, path: str, statements: list[str]) -> str:
        if not path:
            return self._root
        variable = self._variables.get(path)
        if variable is None:
            expression = self.expression(path, statements)
            if path not in self._shared:
                return expression
            variable = self._variables[path] = self._create_name(path)
            statements.append(f"{variable} = {expression}\n")
        return variable


def attribute(owner: str, name: str) -> str:
    """Return an expression for an attribute of `owner`, whatever its name."""
    if name.isidentifier() and not iskeyword(name):
        return f"{owner}.{name}"
    return f'getattr({owner}, "{name}")' if '"' not in name and "\\" not in name else f"getattr({owner}, {name!r})"
