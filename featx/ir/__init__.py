"""The graph, its nodes, and what is known about them."""
