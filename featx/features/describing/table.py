"""NodeTable: what is known of all values inside a model, to choose from before anything is extracted."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, overload

import torch
from torch import nn

from featx.errors import ArgumentTypeError, NodeNameError
from featx.features.describing.table_text import html_of, rich_table_of, text_of
from featx.features.requests.request import expression_of
from featx.ir.paths import did_you_mean

Kind = Literal["input", "module", "operation", "access", "weight"]
Mode = Literal["both", "train", "eval"]


@dataclass(frozen=True)
class NodeInfo:
    """One value inside a model, as a row of `NodeTable`.

    Attributes:
        name: under which it can be asked for.
        kind: "module" is what a module returns; "operation" what a function or method computes outside of torch's own
            layers; "access" reads a part or a property of a value; "input" and "weight" are not computed.
        type: the class of the module or the name of the operation; "input" or "weight" for what is neither.
        shape: its shape on the example; None for what is no tensor.
        shapes: the shapes of the tensors inside what is no tensor, as in `FeatureInfo`.
        dtype: its dtype.
        layout: the meaning of its dimensions, as in `FeatureInfo`.
        channels: the size of C.
        stride: by how many pixels of the input two neighbours are apart.
        prefix_tokens: how many tokens of L stand for no patch of the image.
        parameters: how many numbers the parameters of a module have, those inside it too; each counts once.
        flops: multiplications and additions on the way through it, as `cost` counts them; None where they were not
            counted.
        mode: the modes of the model in which it exists.
        source: file and line of the model that computed it.
    """

    name: str
    kind: Kind
    type: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    layout: str | None
    channels: int | None
    stride: float | tuple[float, ...] | None
    prefix_tokens: int
    parameters: int
    flops: int | None
    mode: Mode
    source: str | None
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def depth(self) -> int:
        """How many parts its name has."""
        return self.name.count(".") + 1


class NodeTable(Sequence[NodeInfo]):
    """Values inside a model, in the order in which they are computed; a module stands before what is inside it.

    It prints the outputs of modules, folded to a depth at which they fit on a screen. `filter` selects rows, and
    `names` gives what `create_feature_extractor` takes.
    """

    def __init__(self, rows: Iterable[NodeInfo], model: str, depth: int | None = None, note: str | None = None) -> None:
        self._rows = tuple(rows)
        self._model = model
        self._depth = depth
        self._note = note

    @property
    def note(self) -> str | None:
        """What the table lacks, and why, such as shapes; None where it lacks nothing."""
        return self._note

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[NodeInfo]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int | str) -> NodeInfo: ...
    @overload
    def __getitem__(self, index: slice) -> NodeTable: ...
    def __getitem__(self, index: int | str | slice) -> NodeInfo | NodeTable:
        """Return a row by its number or name, or a part of the table.

        Raises:
            NodeNameError: there is no row of this name.
        """
        if isinstance(index, str):
            row = next((row for row in self._rows if row.name == index), None)
            if row is None:
                hint = did_you_mean(index, self.names)
                raise NodeNameError(f"the table has no node '{index}'.{hint} table.names has those that it has", index)
            return row
        return self._of(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __contains__(self, row: object) -> bool:
        """Say whether there is this row, or a row of this name."""
        return row in (self.names if isinstance(row, str) else self._rows)

    @property
    def names(self) -> list[str]:
        """The names of the rows."""
        return [row.name for row in self._rows]

    def filter(
        self,
        match: str | Collection[str] | None = None,
        *,
        type: str | type[nn.Module] | None = None,
        kind: Kind | Collection[Kind] | None = None,
        stride: float | Sequence[float] | None = None,
        shape: Sequence[int | None] | None = None,
        layout: str | None = None,
        depth: int | None = None,
    ) -> NodeTable:
        """Return the rows for which all of this holds. O(rows).

        Args:
            match: a pattern of names, as in requests, or several: `"blocks.*"`, `["layer[34].**", "fc"]`.
            type: the class of a module, with those that derive from it, or a name: of a class or of an operation;
                `"*Norm*"` is a pattern.
            kind: one of the kinds of `NodeInfo`, or several.
            stride: of this stride, one number or one for each axis.
            shape: of this shape; None stands for any length.
            layout: of this layout.
            depth: with at most so many parts of the name.

        Raises:
            ArgumentTypeError: a kind is unknown, or another argument is of a type that it cannot have.
        """
        kinds = None if kind is None else _known_kinds(kind)
        patterns = None if match is None else _expressions(match)
        types = None if type is None else _expression_of_types(type)
        lengths = None if shape is None else _lengths(shape)
        wanted = tuple(cast("Sequence[float]", stride)) if isinstance(stride, (list, tuple)) else stride
        for each in wanted if isinstance(wanted, tuple) else (wanted,):
            _check_kind("stride", each, (int, float), "a number, or one for each axis")
        _check_kind("depth", depth, (int,), "a number")
        _check_kind("layout", layout, (str,), "a text such as 'NCHW'")

        def holds(row: NodeInfo) -> bool:
            return (
                (patterns is None or any(pattern.fullmatch(row.name) for pattern in patterns))
                and (types is None or types(row.type))
                and (kinds is None or row.kind in kinds)
                and (wanted is None or row.stride == wanted)
                and (lengths is None or _is_of_shape(row.shape, lengths))
                and (layout is None or row.layout == layout)
                and (depth is None or row.depth <= depth)
            )

        return self._of(filter(holds, self._rows))

    def _of(self, rows: Iterable[NodeInfo]) -> NodeTable:
        return NodeTable(rows, self._model, self._depth, self._note)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dict for each row, of texts, numbers and lists alone: what `json` and data frames take."""
        return [
            {
                **vars(row),
                "shape": None if row.shape is None else list(row.shape),
                "shapes": {path: list(shape) for path, shape in row.shapes.items()},
                "dtype": None if row.dtype is None else str(row.dtype).removeprefix("torch."),
            }
            for row in self._rows
        ]

    def to_text(self, depth: int | None = None, *, everything: bool = False, hint: str | None = None) -> str:
        """Return the table as text.

        Args:
            depth: fold modules that lie deeper; by default as deep as forty rows go.
            everything: operations, accesses and weights too.
            hint: how to see the rows that are left out.
        """
        text = text_of(self._rows, self._model, depth or self._depth, everything=everything, hint=hint)
        return text if self._note is None else f"{text}\n{self._note}"

    def __str__(self) -> str:
        return self.to_text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_of(self._rows, self._model, self._note)

    def __rich__(self) -> Any:
        return rich_table_of(self._rows, self._model, self._depth, self._note)


def _known_kinds(kind: Kind | Collection[Kind]) -> set[str]:
    kinds: list[object] = list(kind) if isinstance(kind, (list, tuple, set, frozenset)) else [kind]
    if not all(isinstance(each, str) and each in get_args(Kind) for each in kinds):
        raise ArgumentTypeError(f"kind may be {', '.join(sorted(get_args(Kind)))}, got {kind!r:.200}")
    return set(map(str, kinds))


def _check_kind(name: str, value: object, kinds: tuple[type, ...], what: str) -> None:
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
        raise ArgumentTypeError(f"{name} must be {what}, got {value!r:.200}")


def _expressions(match: object) -> list[re.Pattern[str]]:
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, (list, tuple, set, frozenset)):
        hint = f"; for a class, filter(type={match.__name__})" if isinstance(match, type) else ""
        raise ArgumentTypeError(
            f"match must be a pattern such as 'layer1.*' or a list of them, got {match!r:.200}{hint}"
        )
    return [expression_of(str(pattern)) for pattern in cast(Collection[object], patterns)]


def _expression_of_types(wanted: object) -> Callable[[str], bool]:
    """Return what says whether a name is that of a class or of one that derives from it, or fits a pattern."""
    if isinstance(wanted, str):
        return lambda name: fnmatch.fnmatchcase(name, wanted)
    if not isinstance(wanted, type):
        raise ArgumentTypeError(f"type must be a class of modules, its name or a pattern of it, got {wanted!r:.200}")
    names: set[str] = set()
    pending = [wanted]
    while pending:
        kind = pending.pop()
        names.add(kind.__name__)
        pending += type.__subclasses__(kind)
    return names.__contains__


def _lengths(shape: object) -> Sequence[int | None]:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise ArgumentTypeError(f"shape must be lengths, such as (None, 64, None, None), got {shape!r:.200}")
    return cast(Sequence[int | None], shape)


def _is_of_shape(shape: tuple[int, ...] | None, wanted: Sequence[int | None]) -> bool:
    if shape is None or len(shape) != len(wanted):
        return False
    return all(length is None or length == size for size, length in zip(shape, wanted, strict=True))
