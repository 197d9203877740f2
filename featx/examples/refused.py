"""The error for a model that does not take the inputs that were guessed for it."""

from __future__ import annotations

from torch import nn

from featx.errors import FeatxError, TraceError


def refused_guess(model: nn.Module, source: str, error: Exception) -> TraceError:
    """Return the error for guessed inputs that a model does not take, or on which it cannot be followed.

    Args:
        model: to which they were given.
        source: what they were guessed from.
        error: what it has raised, or its trace.
    """
    cannot = f"cannot trace {type(model).__name__}"
    reason = str(error) if isinstance(error, FeatxError) else f"{type(error).__name__}: {error}."
    advice = "Give example_inputs that the model takes."
    if any(each.is_meta for each in model.parameters()):
        advice = (
            "The model is on the meta device, whose tensors have no values, and forward may read some. Make it on "
            "the CPU, for names and shapes with fewer layers."
        )
    return TraceError(f"{cannot} on inputs guessed from {source}: {reason.removeprefix(f'{cannot}: ')} {advice}")
