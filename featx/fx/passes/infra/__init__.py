"""The package torch.fx.passes.infra.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer

if TYPE_CHECKING:
    from featx.fx.passes.infra import partitioner as partitioner
    from featx.fx.passes.infra import pass_base as pass_base
    from featx.fx.passes.infra import pass_manager as pass_manager
else:
    __getattr__ = explainer(__name__)
