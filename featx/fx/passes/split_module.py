"""What torch.fx.passes.split_module has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.node import Node
from featx.migration.left_out import explainer
from featx.module import GraphModule
from featx.passes.split import split_module

__all__ = [
    "GraphModule",
    "Node",
    "split_module",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
