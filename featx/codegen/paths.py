"""Turn dotted module paths into expressions, and choose which shared prefixes get a local variable.

`self.layer1` is a dictionary search through `nn.Module.__getattr__`. A chain of them for each call costs more than
small layers do, so the code fetches a prefix once where more than one path goes through it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from featx.codegen.identifiers import around_owner
from featx.ir.paths import parents_of

_MOST_NESTED = 100


class ModulePaths:
    """Expressions for the module paths of one graph.

    `create_name` gives a free variable name for a prefix, `name_of_builtin` the expression for a builtin.
    O(paths * depth) to build.
    """

    def __init__(
        self,
        root: str,
        paths: Iterable[str],
        create_name: Callable[[str], str],
        name_of_builtin: Callable[[str], str] = str,
    ) -> None:
        self._root = root
        self._create_name = create_name
        self._name_of_builtin = name_of_builtin
        self._variables: dict[str, str] = {}
        # By the name of an attribute, as models repeat few names.
        self._around: dict[str, tuple[str, str]] = {}
        branches: defaultdict[str, int] = defaultdict(int)
        seen: set[str] = set()
        for path in paths:
            for prefix in parents_of(path):
                branches[prefix] += 1
                if prefix in seen:
                    break
                seen.add(prefix)
        self._shared = {prefix for prefix, count in branches.items() if count > 1}
        # Python takes 200 parentheses in one another.
        self._shared.update(prefix for prefix in seen if (prefix.count(".") + 1) % _MOST_NESTED == 0)

    def expression(self, path: str, statements: list[str]) -> str:
        """Return an expression for the module or attribute at `path`.

        Assignments of prefixes that it needs and that the code has not made yet are appended to `statements`.
        """
        prefix, dot, last = path.rpartition(".")
        owner = self._prefix(prefix, statements) if dot else self._root
        around = self._around.get(last)
        if around is None:
            around = self._around[last] = around_owner(last, self._name_of_builtin)
        return f"{around[0]}{owner}{around[1]}"

    def _prefix(self, path: str, statements: list[str]) -> str:
        variable = self._variables.get(path)
        if variable is None:
            expression = self.expression(path, statements)
            if path not in self._shared:
                return expression
            variable = self._variables[path] = self._create_name(path)
            statements.append(f"{variable} = {expression}\n")
        return variable
