"""What torch.fx.passes.dialect.common.cse_pass has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.graph import Graph
from featx.ir.node import Node
from featx.migration.left_out import explainer
from featx.migration.pass_manager import CSEPass, PassBase, PassResult
from featx.module import GraphModule

__all__ = [
    "CSEPass",
    "Graph",
    "GraphModule",
    "Node",
    "PassBase",
    "PassResult",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
