"""What torch.fx has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.interpret.interpreter import Interpreter
from featx.interpret.transformer import Transformer
from featx.ir.arguments import map_arg
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.ir.side_effects import has_side_effect
from featx.migration.left_out import explainer
from featx.module import GraphModule
from featx.rewrite.replace import replace_pattern
from featx.traced import symbolic_trace
from featx.tracing.file_globals.wrapping import wrap
from featx.tracing.nodes.proxy import Proxy
from featx.tracing.symbolic.inputs import PH
from featx.tracing.symbolic.proxyable import ProxyableClassMeta
from featx.tracing.symbolic.tracer import Tracer

__all__ = [
    "PH",
    "Graph",
    "GraphModule",
    "Interpreter",
    "Node",
    "Proxy",
    "ProxyableClassMeta",
    "Tracer",
    "Transformer",
    "has_side_effect",
    "map_arg",
    "replace_pattern",
    "symbolic_trace",
    "wrap",
]

if TYPE_CHECKING:
    from featx.fx import _compatibility as _compatibility
    from featx.fx import _lazy_graph_module as _lazy_graph_module
    from featx.fx import _pytree as _pytree
    from featx.fx import _symbolic_trace as _symbolic_trace
    from featx.fx import annotate as annotate
    from featx.fx import config as config
    from featx.fx import experimental as experimental
    from featx.fx import graph as graph
    from featx.fx import graph_module as graph_module
    from featx.fx import immutable_collections as immutable_collections
    from featx.fx import interpreter as interpreter
    from featx.fx import node as node
    from featx.fx import operator_schemas as operator_schemas
    from featx.fx import passes as passes
    from featx.fx import proxy as proxy
    from featx.fx import subgraph_rewriter as subgraph_rewriter
    from featx.fx import tensor_type as tensor_type
    from featx.fx import traceback as traceback
else:
    __getattr__ = explainer(__name__)
