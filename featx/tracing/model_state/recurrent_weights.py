"""The list in which a recurrent layer of torch keeps its parameters once more, and computes with them."""

from __future__ import annotations

from operator import is_
from typing import Any, cast

from torch import nn

# The attributes: the list, and references to its items. A layer makes both anew where a parameter is another one.
OF_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})


def follow_weights(layer: nn.Module) -> bool:
    """Say whether a recurrent layer holds its parameters in its list of these, or will before it computes."""
    weights, recurrent = weights_of(layer), cast(Any, layer)
    if weights is None:
        return False
    known = [None if reference is None else reference() for reference in recurrent._flat_weight_refs]
    return not all(map(is_, weights, known)) or all(map(is_, weights, recurrent._flat_weights))


def weights_of(layer: nn.Module) -> list[Any] | None:
    """Return the parameters of a recurrent layer, in the order of its list of these; None for other layers.

    None too for one whose parameters are computed each time that they are read, as torch.nn.utils.parametrize does.
    """
    if not isinstance(layer, nn.RNNBase) or not hasattr(layer, "_flat_weight_refs"):
        return None
    own: dict[str, Any] = {**layer.__dict__, **dict(dict.items(cast("dict[str, Any]", layer._parameters)))}
    names = layer._flat_weights_names
    return [own[name] for name in names] if own.keys() >= set(names) else None
