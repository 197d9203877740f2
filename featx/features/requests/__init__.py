"""What is asked of a model: names and patterns, what is done to values, edits, and where to start."""
