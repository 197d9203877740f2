"""The package torch.fx.passes.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer

if TYPE_CHECKING:
    from featx.fx.passes import annotate_getitem_nodes as annotate_getitem_nodes
    from featx.fx.passes import backends as backends
    from featx.fx.passes import canonicalize as canonicalize
    from featx.fx.passes import dialect as dialect
    from featx.fx.passes import fake_tensor_prop as fake_tensor_prop
    from featx.fx.passes import graph_drawer as graph_drawer
    from featx.fx.passes import graph_manipulation as graph_manipulation
    from featx.fx.passes import graph_transform_observer as graph_transform_observer
    from featx.fx.passes import infra as infra
    from featx.fx.passes import net_min_base as net_min_base
    from featx.fx.passes import operator_support as operator_support
    from featx.fx.passes import param_fetch as param_fetch
    from featx.fx.passes import pass_manager as pass_manager
    from featx.fx.passes import regional_inductor as regional_inductor
    from featx.fx.passes import regional_inductor_invoke_subgraph as regional_inductor_invoke_subgraph
    from featx.fx.passes import reinplace as reinplace
    from featx.fx.passes import runtime_assert as runtime_assert
    from featx.fx.passes import shape_prop as shape_prop
    from featx.fx.passes import split_module as split_module
    from featx.fx.passes import split_utils as split_utils
    from featx.fx.passes import splitter_base as splitter_base
    from featx.fx.passes import tools_common as tools_common
    from featx.fx.passes import utils as utils
else:
    __getattr__ = explainer(__name__)
