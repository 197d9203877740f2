"""Passes over graph modules: each edits one in place, makes new ones of it, or says what it computes and costs."""

from featx.passes.constants import fold_constants
from featx.passes.cost import cost
from featx.passes.cost_report import Cost, CostReport, ModuleCost, NodeCost
from featx.passes.cse import eliminate_common_subexpressions
from featx.passes.dead_code import eliminate_dead_code
from featx.passes.dropout import remove_dropout
from featx.passes.fuse import fuse_conv_bn
from featx.passes.identity import remove_identity
from featx.passes.layer_scale import fold_layer_scale
from featx.passes.manager import PassManager, this_before_that
from featx.passes.normalize import normalize_arguments
from featx.passes.parallel_linears import merge_parallel_linears
from featx.passes.partition import partition
from featx.passes.profile import profile
from featx.passes.profile_report import ModuleTime, NodeTime, ProfileReport
from featx.passes.roofline import Peaks, Roofline, RooflineNode, measure_peaks, roofline
from featx.passes.shapes import ShapeProp, TensorMetadata
from featx.passes.split import split_at, split_module
from featx.passes.subgraph import extract_subgraph

__all__ = [
    "Cost",
    "CostReport",
    "ModuleCost",
    "ModuleTime",
    "NodeCost",
    "NodeTime",
    "PassManager",
    "Peaks",
    "ProfileReport",
    "Roofline",
    "RooflineNode",
    "ShapeProp",
    "TensorMetadata",
    "cost",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "extract_subgraph",
    "fold_constants",
    "fold_layer_scale",
    "fuse_conv_bn",
    "measure_peaks",
    "merge_parallel_linears",
    "normalize_arguments",
    "partition",
    "profile",
    "remove_dropout",
    "remove_identity",
    "roofline",
    "split_at",
    "split_module",
    "this_before_that",
]
