"""What torch.fx.interpreter has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.interpret.interpreter import Interpreter
from featx.interpret.transformer import Transformer
from featx.ir.arguments import Argument, map_aggregate, map_arg
from featx.ir.graph import Graph
from featx.ir.node import Node, Target
from featx.migration.left_out import explainer
from featx.module import GraphModule
from featx.tracing.nodes.proxy import Proxy
from featx.tracing.symbolic.tracer import Tracer

__all__ = [
    "Argument",
    "Graph",
    "GraphModule",
    "Interpreter",
    "Node",
    "Proxy",
    "Target",
    "Tracer",
    "Transformer",
    "map_aggregate",
    "map_arg",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
