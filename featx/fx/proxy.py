"""What torch.fx.proxy has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.errors import TraceError
from featx.ir.arguments import Argument, map_aggregate, map_arg
from featx.ir.graph import Graph
from featx.ir.immutable import ImmutableDict as immutable_dict
from featx.ir.immutable import ImmutableList as immutable_list
from featx.ir.node import Node, Target
from featx.ir.schemas import check_for_mutable_operation
from featx.migration.compatibility import BASE_TYPES as base_types
from featx.migration.left_out import explainer
from featx.migration.operators import INPLACE as inplace_methods
from featx.migration.operators import MAGIC as magic_methods
from featx.migration.operators import REFLECTABLE as reflectable_magic_methods
from featx.tracing.nodes.proxy import Attribute, ParameterProxy, Proxy
from featx.tracing.nodes.tracer_base import GraphAppendingTracer, TracerBase
from featx.tracing.symbolic.tracer import Scope

__all__ = [
    "Argument",
    "Attribute",
    "Graph",
    "GraphAppendingTracer",
    "Node",
    "ParameterProxy",
    "Proxy",
    "Scope",
    "Target",
    "TraceError",
    "TracerBase",
    "base_types",
    "check_for_mutable_operation",
    "immutable_dict",
    "immutable_list",
    "inplace_methods",
    "magic_methods",
    "map_aggregate",
    "map_arg",
    "reflectable_magic_methods",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
