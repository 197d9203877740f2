"""Inputs of a model: as a caller gives them, or found for a model that is given without any."""

from featx.examples.example import Example, as_example, holds_inputs, inputs_in, inputs_of, refuse_shape
from featx.examples.find import find_example, other_guesses
from featx.examples.refused import refused_guess
from featx.examples.transformers_inputs import without_cache

__all__ = [
    "Example",
    "as_example",
    "find_example",
    "holds_inputs",
    "inputs_in",
    "inputs_of",
    "other_guesses",
    "refuse_shape",
    "refused_guess",
    "without_cache",
]
