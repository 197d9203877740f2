"""What torch.fx.subgraph_rewriter has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.migration.left_out import explainer
from featx.module import GraphModule
from featx.rewrite.replace import Match, ReplacedPatterns, replace_pattern, replace_pattern_with_filters
from featx.traced import symbolic_trace

__all__ = [
    "Graph",
    "GraphModule",
    "Match",
    "Node",
    "ReplacedPatterns",
    "replace_pattern",
    "replace_pattern_with_filters",
    "symbolic_trace",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
