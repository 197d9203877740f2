"""What torch.fx.passes.infra.pass_base has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer
from featx.migration.pass_manager import PassBase, PassResult
from featx.module import GraphModule

__all__ = [
    "GraphModule",
    "PassBase",
    "PassResult",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
