"""The inputs of a run: the example becomes placeholders, checks and followed values, and `forward` is called."""
