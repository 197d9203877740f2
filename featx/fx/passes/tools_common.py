"""What torch.fx.passes.tools_common has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer
from featx.migration.operator_support import CALLABLE_NODE_OPS, get_node_target, is_node_output_tensor
from featx.migration.topology import stable_topological_sort
from featx.migration.topology import stable_topological_sort as legalize_graph

__all__ = [
    "CALLABLE_NODE_OPS",
    "get_node_target",
    "is_node_output_tensor",
    "legalize_graph",
    "stable_topological_sort",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
