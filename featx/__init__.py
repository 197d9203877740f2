"""featx gets any intermediate feature out of a PyTorch model: exactly, fast, and pruned to what was asked.

A name is imported when it is used, so that `import featx` takes no time.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featx import fx as fx
    from featx.bulk.extract import extract
    from featx.bulk.table import FeatureTable, open_features, verify
    from featx.codegen.emit import PythonCode
    from featx.drawing.drawing import Drawing, draw
    from featx.errors import (
        ArgumentTypeError,
        ControlFlowError,
        CostError,
        DrawingError,
        DrawnAwayError,
        ExtractionError,
        FeatxError,
        ForeignNodeError,
        GraphError,
        InputError,
        LeftOutError,
        LeftOutImportError,
        MissingExtraError,
        ModulePathError,
        MutationError,
        NodeInUseError,
        NodeNameError,
        NodeTargetError,
        OpcodeError,
        OptimizationError,
        PassError,
        PatternError,
        RequestError,
        RootError,
        ScriptError,
        SlowTraceWarning,
        SpecializationError,
        TargetError,
        TraceError,
        UnsupportedArgumentError,
    )
    from featx.features.adaptive import AdaptiveExtractor
    from featx.features.backbone import Backbone, create_backbone
    from featx.features.building.feature_tracer import FeatureTracer
    from featx.features.building.prune import prune
    from featx.features.describing.info import FeatureInfo, FeatureInfos
    from featx.features.describing.node_rows import nodes
    from featx.features.describing.table import NodeInfo, NodeTable
    from featx.features.dual import DualGraphModule
    from featx.features.extractor import create_feature_extractor
    from featx.features.necks import BackboneWithNeck
    from featx.features.nodes import get_graph_node_names
    from featx.features.requests.edits import zero
    from featx.features.requests.feature import Feature
    from featx.features.requests.select import select
    from featx.interop.torch_fx import from_torch_fx, to_torch_fx
    from featx.interpret.interpreter import Interpreter
    from featx.interpret.transformer import Transformer
    from featx.ir.arguments import map_aggregate, map_arg
    from featx.ir.graph import Graph
    from featx.ir.node import Node
    from featx.ir.side_effects import has_side_effect
    from featx.module import GraphModule
    from featx.optimization.module import OptimizedExtractor
    from featx.optimization.optimize import optimize
    from featx.optimization.plan import Plan
    from featx.passes.cost import cost
    from featx.passes.profile import profile
    from featx.passes.shapes import ShapeProp
    from featx.rewrite.match import SubgraphMatcher
    from featx.rewrite.replace import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters
    from featx.traced import symbolic_trace, trace
    from featx.tracing.example.tracer import ExampleTracer
    from featx.tracing.file_globals.wrapping import wrap
    from featx.tracing.nodes.proxy import Attribute, ParameterProxy, Proxy
    from featx.tracing.nodes.tracer_base import GraphAppendingTracer, TracerBase
    from featx.tracing.symbolic.inputs import PH
    from featx.tracing.symbolic.proxyable import ProxyableClassMeta
    from featx.tracing.symbolic.tracer import Tracer

__version__ = "0.1.0"
__all__ = [
    "PH",
    "AdaptiveExtractor",
    "ArgumentTypeError",
    "Attribute",
    "Backbone",
    "BackboneWithNeck",
    "ControlFlowError",
    "CostError",
    "Drawing",
    "DrawingError",
    "DrawnAwayError",
    "DualGraphModule",
    "ExampleTracer",
    "ExtractionError",
    "Feature",
    "FeatureInfo",
    "FeatureInfos",
    "FeatureTable",
    "FeatureTracer",
    "FeatxError",
    "ForeignNodeError",
    "Graph",
    "GraphAppendingTracer",
    "GraphError",
    "GraphModule",
    "InputError",
    "Interpreter",
    "LeftOutError",
    "LeftOutImportError",
    "Match",
    "MissingExtraError",
    "ModulePathError",
    "MutationError",
    "Node",
    "NodeInUseError",
    "NodeInfo",
    "NodeNameError",
    "NodeTable",
    "NodeTargetError",
    "OpcodeError",
    "OptimizationError",
    "OptimizedExtractor",
    "ParameterProxy",
    "PassError",
    "PatternError",
    "Plan",
    "Proxy",
    "ProxyableClassMeta",
    "PythonCode",
    "ReplacedPatterns",
    "RequestError",
    "RootError",
    "ScriptError",
    "ShapeProp",
    "SlowTraceWarning",
    "SpecializationError",
    "SubgraphMatcher",
    "TargetError",
    "TraceError",
    "Tracer",
    "TracerBase",
    "Transformer",
    "UnsupportedArgumentError",
    "cost",
    "create_backbone",
    "create_feature_extractor",
    "draw",
    "extract",
    "from_torch_fx",
    "get_graph_node_names",
    "has_side_effect",
    "map_aggregate",
    "map_arg",
    "nodes",
    "open_features",
    "optimize",
    "profile",
    "prune",
    "replace_pattern",
    "replace_pattern_with_filters",
    "select",
    "symbolic_trace",
    "to_torch_fx",
    "trace",
    "verify",
    "wrap",
    "zero",
]
# Where each name is defined: what a type checker reads above.
_NAMES = {
    "featx.bulk.extract": "extract",
    "featx.bulk.table": "FeatureTable open_features verify",
    "featx.codegen.emit": "PythonCode",
    "featx.drawing.drawing": "Drawing draw",
    "featx.errors": (
        "ArgumentTypeError ControlFlowError CostError DrawingError DrawnAwayError ExtractionError FeatxError "
        "ForeignNodeError GraphError InputError LeftOutError LeftOutImportError MissingExtraError "
        "ModulePathError MutationError NodeInUseError NodeNameError NodeTargetError OpcodeError "
        "OptimizationError PassError PatternError RequestError RootError ScriptError SlowTraceWarning "
        "SpecializationError TargetError TraceError UnsupportedArgumentError"
    ),
    "featx.features.adaptive": "AdaptiveExtractor",
    "featx.features.backbone": "Backbone create_backbone",
    "featx.features.necks": "BackboneWithNeck",
    "featx.features.building.prune": "prune",
    "featx.features.building.feature_tracer": "FeatureTracer",
    "featx.features.describing.info": "FeatureInfo FeatureInfos",
    "featx.features.describing.node_rows": "nodes",
    "featx.features.describing.table": "NodeInfo NodeTable",
    "featx.features.dual": "DualGraphModule",
    "featx.features.extractor": "create_feature_extractor",
    "featx.features.nodes": "get_graph_node_names",
    "featx.features.requests.edits": "zero",
    "featx.features.requests.feature": "Feature",
    "featx.features.requests.select": "select",
    "featx.interop.torch_fx": "from_torch_fx to_torch_fx",
    "featx.interpret.interpreter": "Interpreter",
    "featx.interpret.transformer": "Transformer",
    "featx.ir.arguments": "map_aggregate map_arg",
    "featx.ir.graph": "Graph",
    "featx.ir.node": "Node",
    "featx.ir.side_effects": "has_side_effect",
    "featx.module": "GraphModule",
    "featx.traced": "symbolic_trace trace",
    "featx.optimization.module": "OptimizedExtractor",
    "featx.optimization.optimize": "optimize",
    "featx.optimization.plan": "Plan",
    "featx.passes.cost": "cost",
    "featx.passes.profile": "profile",
    "featx.passes.shapes": "ShapeProp",
    "featx.rewrite.match": "SubgraphMatcher",
    "featx.rewrite.replace": "Match ReplacedPatterns replace_pattern replace_pattern_with_filters",
    "featx.tracing.nodes.tracer_base": "GraphAppendingTracer TracerBase",
    "featx.tracing.file_globals.wrapping": "wrap",
    "featx.tracing.example.tracer": "ExampleTracer",
    "featx.tracing.symbolic.inputs": "PH",
    "featx.tracing.nodes.proxy": "Attribute ParameterProxy Proxy",
    "featx.tracing.symbolic.proxyable": "ProxyableClassMeta",
    "featx.tracing.symbolic.tracer": "Tracer",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:  # Any: whatever is asked for
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif (
        name.isidentifier() and not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}") is not None
    ):
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "fx"})
