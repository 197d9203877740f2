"""What both tracers share: calls and values become nodes, with names."""
