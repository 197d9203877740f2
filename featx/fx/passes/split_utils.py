"""What torch.fx.passes.split_utils has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.grouping import getattr_recursive, setattr_recursive, split_by_tags
from featx.migration.left_out import explainer
from featx.migration.operator_support import is_node_output_tensor

__all__ = [
    "getattr_recursive",
    "is_node_output_tensor",
    "setattr_recursive",
    "split_by_tags",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
