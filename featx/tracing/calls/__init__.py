"""The calls of running code: of torch, of modules and of functions. Each becomes a node, or is followed."""
