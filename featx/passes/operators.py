"""What the schema of an operator says of its calls: which tensors they write, whether results are views; and modes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Running statistics that an operator writes although its schema does not say so: their positions.
_UNMARKED = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
}


class Signature:
    """The facts about one operator. `name` is `aten::add`, `overload` the `OpOverload` itself."""

    __slots__ = (
        "_unmarked",
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
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self._unmarked = _UNMARKED.get(self.name, ())
        returned = [result.alias_info for result in schema.returns if result.alias_info is not None]
        self.is_view = any(not alias.is_write for alias in returned)
        tags = overload.tags
        # Whether the result may be a number, or of a shape, that only values tell; and whether it always is.
        self.needs_values = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        self.asks = self.needs_values and self.name not in ("aten::index", "aten::_unsafe_index")
        self.draws = torch.Tag.nondeterministic_seeded in tags
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        # Those of `prim`, which ask a tensor for its device and the like, are not known to the dispatcher.
        self.is_composite = not self.name.startswith("prim") and bool(
            has_kernel(overload.name(), "CompositeImplicitAutograd")
        )
        self.replaces_memory = torch.Tag.inplace_view in tags

    def targets(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Yield the tensors that a call writes."""
        if self._unmarked and not (len(args) > 5 and args[5] is False):  # in eval mode statistics are only read
            yield from tensors_in([args[position] for position in self._unmarked])
        for position, name in self.written:
            yield from tensors_in((args[position] if position < len(args) else kwargs.get(name),))


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


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that gets basic operators only, and those of higher order, in `on_operator`.

    In inference mode composite ones (`linear`, `batch_norm`) come here whole; they are taken apart.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._signatures = Signatures()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What torch does to keep its compiler away from a mode loads that compiler, which takes seconds.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take an operator apart, or hand it to `on_operator`."""
        signature = self._signatures.of(func)
        if signature is not None and signature.is_composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.on_operator(func, signature, args, kwargs or {})

    def on_operator(self, func: Any, signature: Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; `signature` is None for one of higher order."""
        return func(*args, **kwargs)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or results of an operator, which nest lists and tuples only."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
