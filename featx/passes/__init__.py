"""Passes over graph modules: each edits one in place and says whether it changed anything, or makes new ones of it."""

from featx.passes.constants import fold_constants
from featx.passes.cse import eliminate_common_subexpressions
from featx.passes.dead_code import eliminate_dead_code
from featx.passes.dropout import remove_dropout
from featx.passes.fuse import fuse_conv_bn
from featx.passes.manager import PassManager, this_before_that
from featx.passes.normalize import normalize_arguments
from featx.passes.partition import partition
from featx.passes.split import split_at, split_module
from featx.passes.subgraph import extract_subgraph

__all__ = [
    "PassManager",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "extract_subgraph",
    "fold_constants",
    "fuse_conv_bn",
    "normalize_arguments",
    "partition",
    "remove_dropout",
    "split_at",
    "split_module",
    "this_before_that",
]
