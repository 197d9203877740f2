"""Lists and dicts inside the arguments of nodes, which refuse edits that the graph would not see."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch.utils._pytree as pytree

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


# How torch's tree functions see them: without this a list would be one leaf, and the nodes inside it passed over.


def _items_of_list(value: Any) -> tuple[list[Any], None]:
    return list(value), None


def _keyed_items_of_list(value: Any) -> Any:  # Any: torch's own keys do not satisfy the protocol that it asks for
    return [(pytree.SequenceKey(index), item) for index, item in enumerate(value)], None


def _list_of(items: Iterable[Any], _: Any) -> ImmutableList:
    return ImmutableList(items)


def _items_of_dict(value: Any) -> tuple[list[Any], list[Any]]:
    return list(value.values()), list(value)


def _keyed_items_of_dict(value: Any) -> Any:  # Any: as above
    return [(pytree.MappingKey(key), item) for key, item in value.items()], list(value)


def _dict_of(items: Iterable[Any], keys: Any) -> ImmutableDict:
    return ImmutableDict(zip(keys, items, strict=True))


pytree.register_pytree_node(
    ImmutableList,
    _items_of_list,
    _list_of,
    serialized_type_name="featx.ImmutableList",
    flatten_with_keys_fn=_keyed_items_of_list,
)
pytree.register_pytree_node(
    ImmutableDict,
    _items_of_dict,
    _dict_of,
    serialized_type_name="featx.ImmutableDict",
    flatten_with_keys_fn=_keyed_items_of_dict,
)
