"""What torch.fx.immutable_collections has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.ir.immutable import ImmutableDict as immutable_dict
from featx.ir.immutable import ImmutableList as immutable_list
from featx.migration.left_out import explainer

__all__ = [
    "immutable_dict",
    "immutable_list",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
