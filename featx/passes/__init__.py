"""Passes over graph modules: what a graph computes, what it costs, and how long it takes."""

from featx.passes.cost import cost
from featx.passes.shapes import ShapeProp

__all__ = ["ShapeProp", "cost"]
