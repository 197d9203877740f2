"""What torch.fx.traceback has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.compatibility import preserve_node_meta
from featx.migration.left_out import explainer

__all__ = [
    "preserve_node_meta",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
