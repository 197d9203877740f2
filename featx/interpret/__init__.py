"""Run a graph node by node, and rebuild one that way."""
