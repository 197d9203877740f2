"""What torch.fx.node has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.arguments import Argument, map_aggregate, map_arg
from featx.ir.node import Node, Target
from featx.ir.schemas import ArgsKwargsPair, normalize_function, normalize_module
from featx.ir.side_effects import has_side_effect
from featx.migration.compatibility import BASE_TYPES as base_types
from featx.migration.compatibility import BaseArgumentTypes
from featx.migration.left_out import explainer
from featx.migration.operator_support import target_name as _get_qualified_name

__all__ = [
    "ArgsKwargsPair",
    "Argument",
    "BaseArgumentTypes",
    "Node",
    "Target",
    "_get_qualified_name",
    "base_types",
    "has_side_effect",
    "map_aggregate",
    "map_arg",
    "normalize_function",
    "normalize_module",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
