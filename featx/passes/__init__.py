"""Passes over graph modules: what a graph computes, what it costs, and how long it takes."""

from featx.passes.cost import cost
from featx.passes.cost_report import Cost, CostReport, ModuleCost, NodeCost
from featx.passes.shapes import ShapeProp, TensorMetadata

__all__ = ["Cost", "CostReport", "ModuleCost", "NodeCost", "ShapeProp", "TensorMetadata", "cost"]
