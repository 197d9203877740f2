"""What torch.fx.passes.shape_prop has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.arguments import map_aggregate
from featx.ir.node import Node
from featx.migration.left_out import explainer
from featx.passes.shapes import ShapeProp, TensorMetadata
from featx.passes.shapes import metadata_of as _extract_tensor_metadata

__all__ = [
    "Node",
    "ShapeProp",
    "TensorMetadata",
    "_extract_tensor_metadata",
    "map_aggregate",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
