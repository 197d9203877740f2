"""Samples: where they come from, how they are read, and what the model gets of them."""
