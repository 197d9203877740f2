"""Tensors without values, and what calls on them give."""
