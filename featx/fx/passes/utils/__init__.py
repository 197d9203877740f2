"""The package torch.fx.passes.utils.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer

if TYPE_CHECKING:
    from featx.fx.passes.utils import common as common
    from featx.fx.passes.utils import fuser_utils as fuser_utils
    from featx.fx.passes.utils import matcher_utils as matcher_utils
    from featx.fx.passes.utils import matcher_with_name_node_map_utils as matcher_with_name_node_map_utils
    from featx.fx.passes.utils import source_matcher_utils as source_matcher_utils
else:
    __getattr__ = explainer(__name__)
