"""The package torch.fx.experimental.

Written by scripts/write_fx.py from featx/migration/table.py, not by hand.
"""

from typing import TYPE_CHECKING

from featx.migration.left_out import explainer

if TYPE_CHECKING:
    from featx.fx.experimental import accelerator_partitioner as accelerator_partitioner
    from featx.fx.experimental import const_fold as const_fold
    from featx.fx.experimental import debug as debug
    from featx.fx.experimental import dynamic_spec as dynamic_spec
    from featx.fx.experimental import graph_gradual_typechecker as graph_gradual_typechecker
    from featx.fx.experimental import merge_matmul as merge_matmul
    from featx.fx.experimental import meta_tracer as meta_tracer
    from featx.fx.experimental import migrate_gradual_types as migrate_gradual_types
    from featx.fx.experimental import normalize as normalize
    from featx.fx.experimental import optimization as optimization
    from featx.fx.experimental import partitioner_utils as partitioner_utils
    from featx.fx.experimental import proxy_tensor as proxy_tensor
    from featx.fx.experimental import recording as recording
    from featx.fx.experimental import refinement_types as refinement_types
    from featx.fx.experimental import rewriter as rewriter
    from featx.fx.experimental import schema_type_annotation as schema_type_annotation
    from featx.fx.experimental import sym_node as sym_node
    from featx.fx.experimental import symbolic_shapes as symbolic_shapes
    from featx.fx.experimental import unification as unification
    from featx.fx.experimental import unify_refinements as unify_refinements
    from featx.fx.experimental import validator as validator
else:
    __getattr__ = explainer(__name__)
