"""What torch.fx.experimental.optimization has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer
from featx.migration.optimization import (
    extract_subgraph,
    fuse,
    matches_module_pattern,
    remove_dropout,
    replace_node_module,
)

__all__ = [
    "extract_subgraph",
    "fuse",
    "matches_module_pattern",
    "remove_dropout",
    "replace_node_module",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
