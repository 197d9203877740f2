"""How a model is to be traced for feature extraction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from featx.errors import ArgumentTypeError
from featx.features.requests.edits import Edits
from featx.features.requests.starts import Starts
from featx.tracing.example.tracer import CheckSizes
from featx.tracing.nodes.naming import CallSite
from featx.tracing.sizes.outcomes import FreeDims

TracerName = Literal["auto", "example", "symbolic"]


@dataclass(frozen=True, kw_only=True)
class TracingOptions:
    """How a model is to be traced.

    Attributes:
        tracer_kwargs: options of `FeatureTracer`.
        concrete_args: inputs that are fixed to a value, by name.
        example_inputs: inputs to follow; None for those that the model declares or its first layer suggests.
        tracer: which tracer.
        check_sizes: of which dimensions of the inputs other lengths are tried.
        edits: what is done to nodes before the requested values are cut out.
        starts: where the graph begins, if that is not at the inputs of the model.
        opened: the paths of modules to look into, whatever is requested.
        opens_operators: look into the modules of torchvision.ops, of which a list of names has none inside.
        opens_stacks: look into torch's stacks of layers, which are one node each in a list of names.
        makes_values: a graph computes what is returned; one that is only described may differ in a second call.
        earlier_dims: what was found of the dimensions of other inputs of the model, by mode.
        call_sites: which calls in the code of the model names meant for other inputs, by mode.
    """

    tracer_kwargs: Mapping[str, Any] | None = None
    concrete_args: dict[str, Any] | None = None
    example_inputs: Any = None
    tracer: TracerName = "auto"
    check_sizes: CheckSizes = "full"
    edits: Edits | None = None
    starts: Starts | None = None
    opened: frozenset[str] = frozenset()
    opens_operators: bool = False
    opens_stacks: bool = False
    makes_values: bool = False
    earlier_dims: Mapping[bool, FreeDims | None] = field(default_factory=dict)
    call_sites: Mapping[bool, Mapping[str, CallSite]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise an ArgumentTypeError where an option has the wrong type or an unknown name."""
        if self.check_sizes not in get_args(CheckSizes):
            raise ArgumentTypeError(f"check_sizes must be 'full', 'batch' or 'none', got {self.check_sizes!r}")
        if self.tracer not in get_args(TracerName):
            raise ArgumentTypeError(f"tracer must be 'auto', 'example' or 'symbolic', got {self.tracer!r}")
        if isinstance(self.tracer_kwargs, (torch.Tensor, tuple, list)):
            raise ArgumentTypeError(
                f"tracer_kwargs must be a dict of options of the tracer, got a {type(self.tracer_kwargs).__name__}; "
                "give inputs by name: example_inputs=..."
            )
