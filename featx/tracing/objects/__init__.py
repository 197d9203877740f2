"""Python objects and modules: their parts, whatever a trace does with them."""
