"""What torch.fx.passes.infra.partitioner has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.node import Node
from featx.migration.left_out import explainer
from featx.migration.operator_support import OperatorSupportBase
from featx.migration.partitioner import CapabilityBasedPartitioner, Partition
from featx.module import GraphModule

__all__ = [
    "CapabilityBasedPartitioner",
    "GraphModule",
    "Node",
    "OperatorSupportBase",
    "Partition",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
