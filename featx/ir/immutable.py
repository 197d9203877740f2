"""Lists and dicts inside the arguments of nodes, which refuse edits that the graph would not see."""

from __future__ import annotations

from typing import Any, NoReturn

from featx.errors import ArgumentTypeError


class ImmutableList(list[Any]):
    """A list inside the arguments of a node. Assign new `args` to change it: an edit in place would go unseen."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ArgumentTypeError("a list in node.args cannot be changed in place; assign a new tuple to node.args")

    append = extend = insert = remove = clear = reverse = _refuse
    sort = _refuse  # pyright: ignore[reportAssignmentType]
    pop = __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[Any, ...]:
        return ImmutableList, (list(self),)

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(self))


class ImmutableDict(dict[Any, Any]):
    """A dict inside the arguments of a node. Assign new `kwargs` to change it: an edit in place would go unseen."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ArgumentTypeError("a dict in node.kwargs cannot be changed in place; assign a new dict to node.kwargs")

    __setitem__ = __delitem__ = __ior__ = _refuse  # pyright: ignore[reportAssignmentType]
    clear = pop = popitem = setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[Any, ...]:
        return ImmutableDict, (dict(self),)

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))
