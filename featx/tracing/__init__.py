"""Models to graphs."""
