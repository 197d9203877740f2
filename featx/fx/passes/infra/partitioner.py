"""What torch.fx.passes.infra.partitioner has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.grouping import CapabilityBasedPartitioner, Partition
from featx.migration.left_out import explainer

__all__ = [
    "CapabilityBasedPartitioner",
    "Partition",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
