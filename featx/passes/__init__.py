"""Passes over graph modules: what a graph computes, what it costs, and how long it takes."""

from featx.passes.cost import cost
from featx.passes.cost_report import Cost, CostReport, ModuleCost, NodeCost
from featx.passes.profile import profile
from featx.passes.profile_report import ModuleTime, NodeTime, ProfileReport
from featx.passes.roofline import Peaks, Roofline, RooflineNode, measure_peaks, roofline
from featx.passes.shapes import ShapeProp, TensorMetadata

__all__ = [
    "Cost",
    "CostReport",
    "ModuleCost",
    "ModuleTime",
    "NodeCost",
    "NodeTime",
    "Peaks",
    "ProfileReport",
    "Roofline",
    "RooflineNode",
    "ShapeProp",
    "TensorMetadata",
    "cost",
    "measure_peaks",
    "profile",
    "roofline",
]
