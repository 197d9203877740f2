"""What torch.fx.passes.infra.pass_manager has, from where featx has it.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer
from featx.migration.pass_manager import PassManager, PassResult, pass_result_wrapper, this_before_that_pass_constraint
from featx.module import GraphModule

__all__ = [
    "GraphModule",
    "PassManager",
    "PassResult",
    "pass_result_wrapper",
    "this_before_that_pass_constraint",
]

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
