"""What torch.fx.passes.utils.matcher_utils has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.migration.left_out import explainer
from featx.rewrite.match import InternalMatch, SubgraphMatcher

__all__ = [
    "Graph",
    "InternalMatch",
    "Node",
    "SubgraphMatcher",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
