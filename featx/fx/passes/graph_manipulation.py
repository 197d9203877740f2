"""What torch.fx.passes.graph_manipulation has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.arguments import map_arg
from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.migration.grouping import replace_target_nodes_with
from featx.migration.left_out import explainer
from featx.module import GraphModule
from featx.passes.shapes import ShapeProp, TensorMetadata

__all__ = [
    "Graph",
    "GraphModule",
    "Node",
    "ShapeProp",
    "TensorMetadata",
    "map_arg",
    "replace_target_nodes_with",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
