"""What torch.fx.operator_schemas has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.schemas import (
    ArgsKwargsPair,
    check_for_mutable_operation,
    get_signature_for_torch_op,
    normalize_function,
    normalize_module,
    type_matches,
)
from featx.migration.left_out import explainer

__all__ = [
    "ArgsKwargsPair",
    "check_for_mutable_operation",
    "get_signature_for_torch_op",
    "normalize_function",
    "normalize_module",
    "type_matches",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
