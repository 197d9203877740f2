"""What torch.fx.passes.operator_support has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer
from featx.migration.operator_support import (
    CALLABLE_NODE_OPS,
    OperatorSupport,
    OperatorSupportBase,
    OpSupports,
    any_chain,
    chain,
    create_op_support,
    get_node_target,
)
from featx.passes.shapes import TensorMetadata

__all__ = [
    "CALLABLE_NODE_OPS",
    "OpSupports",
    "OperatorSupport",
    "OperatorSupportBase",
    "TensorMetadata",
    "any_chain",
    "chain",
    "create_op_support",
    "get_node_target",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
