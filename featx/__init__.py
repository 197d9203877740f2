"""featx gets any intermediate feature out of a PyTorch model: exactly, fast, and pruned to what was asked."""

from featx.codegen.emit import PythonCode
from featx.errors import (
    ArgumentTypeError,
    ControlFlowError,
    FeatxError,
    ForeignNodeError,
    GraphError,
    ModulePathError,
    NodeInUseError,
    NodeNameError,
    PassError,
    RequestError,
    SpecializationError,
    TargetError,
    TraceError,
)
from featx.features.adaptive import AdaptiveExtractor
from featx.features.dual import DualGraphModule
from featx.features.extractor import create_feature_extractor
from featx.features.nodes import get_graph_node_names
from featx.features.prune import prune
from featx.features.select import select
from featx.features.tracing import FeatureTracer
from featx.ir.graph import Graph
from featx.ir.node import Node, map_aggregate, map_arg
from featx.module import GraphModule, symbolic_trace, trace
from featx.tracing.example import ExampleTracer
from featx.tracing.inputs import PH
from featx.tracing.proxy import Attribute, ParameterProxy, Proxy
from featx.tracing.symbolic import Tracer
from featx.tracing.tracer import GraphAppendingTracer, TracerBase
from featx.tracing.wrapping import wrap

__version__ = "0.1.0"
__all__ = [
    "PH",
    "AdaptiveExtractor",
    "ArgumentTypeError",
    "Attribute",
    "ControlFlowError",
    "DualGraphModule",
    "ExampleTracer",
    "FeatureTracer",
    "FeatxError",
    "ForeignNodeError",
    "Graph",
    "GraphAppendingTracer",
    "GraphError",
    "GraphModule",
    "ModulePathError",
    "Node",
    "NodeInUseError",
    "NodeNameError",
    "ParameterProxy",
    "PassError",
    "Proxy",
    "PythonCode",
    "RequestError",
    "SpecializationError",
    "TargetError",
    "TraceError",
    "Tracer",
    "TracerBase",
    "create_feature_extractor",
    "get_graph_node_names",
    "map_aggregate",
    "map_arg",
    "prune",
    "select",
    "symbolic_trace",
    "trace",
    "wrap",
]
