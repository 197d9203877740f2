"""Runs of a model at other sizes than its example's: which lengths of its inputs leave the graph as it is."""
