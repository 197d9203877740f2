"""Room on the stack for models that are nested deeply."""

from __future__ import annotations

import sys

from featx.tracing.environment.recursion import raised_recursion_limit


def test_a_trace_that_ends_leaves_the_room_of_another_thread() -> None:
    limit = sys.getrecursionlimit()
    first, second = raised_recursion_limit(100), raised_recursion_limit(200)
    first.__enter__()
    of_one = sys.getrecursionlimit() - limit
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getrecursionlimit() == limit + 2 * of_one
    second.__exit__(None, None, None)
    assert sys.getrecursionlimit() == limit
