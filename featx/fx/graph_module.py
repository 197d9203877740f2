"""What torch.fx.graph_module has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.codegen.emit import PythonCode
from featx.ir.graph import Graph
from featx.migration.left_out import explainer
from featx.module import GraphModule

__all__ = [
    "Graph",
    "GraphModule",
    "PythonCode",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
