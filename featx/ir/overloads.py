"""What the schema of an operator says of its calls: which tensors they write, and whether results are views."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from featx.ir.operator_facts import facts_of, is_written, statistics_written


class Signature:
    """The facts about one operator. `name` is `aten::add`, `overload` the `OpOverload` itself."""

    __slots__ = (
        "_makes_tensors",
        "_writes_statistics",
        "asks",
        "draws",
        "is_composite",
        "is_view",
        "name",
        "needs_values",
        "overload",
        "replaces_memory",
        "written",
    )

    def __init__(self, overload: Any) -> None:
        self.overload = overload
        schema = overload._schema
        self.name: str = schema.name
        # The arguments that are written, by position and name.
        self.written = [
            (position, argument.name) for position, argument in enumerate(schema.arguments) if is_written(argument)
        ]
        namespace, _, name = self.name.partition("::")
        # Which its schema does not say.
        self._writes_statistics = namespace == "aten" and facts_of(name).writes_statistics
        returned = [result.alias_info for result in schema.returns if result.alias_info is not None]
        self.is_view = any(not alias.is_write for alias in returned)
        tags = overload.tags
        # Whether the result may be a number, or of a shape, that only values tell; and whether it always is.
        self.needs_values = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        self.asks = self.needs_values and self.name not in ("aten::index", "aten::_unsafe_index")
        self.draws = torch.Tag.nondeterministic_seeded in tags
        # What asks a tensor for its device or its symbolic size is not known to the dispatcher.
        operator = overload.name()
        self.is_composite = torch._C._dispatch_has_kernel(operator) and bool(
            torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CompositeImplicitAutograd")
        )
        self.replaces_memory = torch.Tag.inplace_view in tags
        # Whether it returns tensors alone: new ones, or one view of the first argument.
        self._makes_tensors = (
            bool(schema.returns)
            and all(isinstance(result.type, torch.TensorType) for result in schema.returns)
            and not (self.written or self.needs_values or self.replaces_memory)
            and (not returned or (len(schema.returns) == 1 and schema.arguments[0].alias_info is not None))
        )

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors that a call writes."""
        if self._writes_statistics:
            yield from tensors_among(statistics_written(self.overload.overloadpacket, args, kwargs))
        for position, name in self.written:
            yield from tensors_among((args[position] if position < len(args) else kwargs.get(name),))

    def only_makes_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Say whether a call returns tensors and does nothing else: new ones, or one view of the first argument."""
        return self._makes_tensors and not (self._writes_statistics and any(True for _ in self.targets(args, kwargs)))


class Signatures:
    """Remembers the facts about each operator that was asked for."""

    def __init__(self) -> None:
        self._known: dict[Any, Signature] = {}

    def of(self, overload: Any) -> Signature | None:
        """Return the facts about an operator; None for one of higher order, which has no schema."""
        known = self._known.get(overload)
        if known is None and isinstance(overload, torch._ops.OpOverload):
            known = self._known[overload] = Signature(overload)
        return known


def tensors_among(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or results of an operator, which nest lists and tuples only.

    `featx.tree.tensors_in` looks into dicts and dataclasses too.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_among(value)
