"""What torch.fx.graph has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.codegen.emit import PythonCode
from featx.ir.arguments import Argument, map_aggregate, map_arg
from featx.ir.graph import Graph
from featx.ir.immutable import ImmutableDict as immutable_dict
from featx.ir.node import Node, Target
from featx.migration.left_out import explainer
from featx.migration.operators import INPLACE as inplace_methods
from featx.migration.operators import MAGIC as magic_methods
from featx.migration.operators import REFLECTABLE as reflectable_magic_methods

__all__ = [
    "Argument",
    "Graph",
    "Node",
    "PythonCode",
    "Target",
    "immutable_dict",
    "inplace_methods",
    "magic_methods",
    "map_aggregate",
    "map_arg",
    "reflectable_magic_methods",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
