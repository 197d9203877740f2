"""torch.fx.passes.param_fetch is left out; its names say why.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer

if not TYPE_CHECKING:
    __getattr__ = explainer(__name__)
