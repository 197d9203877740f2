"""Find code that takes a part of something between two bounds which it computes."""

from __future__ import annotations

import ast
import functools
from types import CodeType

from featx.tracing.source.frames import is_library_code
from featx.tracing.source.location import names_in, source_of


@functools.lru_cache(maxsize=4096)
def has_computed_slices(code: CodeType) -> bool:
    """Say whether `code`, or code inside it, may take `items[a:b]` with two computed bounds, or make such a slice.

    `x[:, a:b]` takes no part of a list. Code of torch does not count. Without source: yes.
    """
    if is_library_code(code):
        return False
    source = source_of(code)
    definition = None if source is None else source.function_of(code)
    if definition is None or not names_in(code).isdisjoint({"slice", "islice"}):
        return True
    slices = (node.slice for node in ast.walk(definition) if isinstance(node, ast.Subscript))
    return any(isinstance(each, ast.Slice) and _is_computed(each.lower) and _is_computed(each.upper) for each in slices)


def _is_computed(bound: ast.expr | None) -> bool:
    if isinstance(bound, ast.UnaryOp):
        bound = bound.operand
    return bound is not None and not isinstance(bound, ast.Constant)
