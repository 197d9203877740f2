"""Find what looks like a pattern in a graph, and replace it; `ANY` and `AnyOf` stand in patterns."""

from featx.rewrite.wildcards import ANY, AnyOf

__all__ = ["ANY", "AnyOf"]
