"""The package torch.fx.passes.dialect.common.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer

if TYPE_CHECKING:
    from featx.fx.passes.dialect.common import cse_pass as cse_pass
else:
    __getattr__ = explainer(__name__)
