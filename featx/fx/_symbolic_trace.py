"""What torch.fx._symbolic_trace has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.arguments import Argument, map_aggregate, map_arg
from featx.ir.graph import Graph
from featx.ir.node import Node, Target
from featx.migration.compatibility import BASE_TYPES as base_types
from featx.migration.compatibility import compatibility
from featx.migration.left_out import explainer
from featx.module import GraphModule
from featx.traced import symbolic_trace
from featx.tracing.file_globals.wrapping import wrap
from featx.tracing.guards.input_checks import check_is_none as _assert_is_none
from featx.tracing.nodes.proxy import ParameterProxy, Proxy
from featx.tracing.nodes.tracer_base import TracerBase
from featx.tracing.symbolic.inputs import PH, PHBase
from featx.tracing.symbolic.proxyable import ProxyableClassMeta
from featx.tracing.symbolic.tracer import Scope, Tracer
from featx.tracing.symbolic.tracer import is_tracing as is_fx_symbolic_tracing
from featx.tracing.symbolic.tracer import is_tracing as is_fx_tracing

__all__ = [
    "PH",
    "Argument",
    "Graph",
    "GraphModule",
    "Node",
    "PHBase",
    "ParameterProxy",
    "Proxy",
    "ProxyableClassMeta",
    "Scope",
    "Target",
    "Tracer",
    "TracerBase",
    "_assert_is_none",
    "base_types",
    "compatibility",
    "is_fx_symbolic_tracing",
    "is_fx_tracing",
    "map_aggregate",
    "map_arg",
    "symbolic_trace",
    "wrap",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
