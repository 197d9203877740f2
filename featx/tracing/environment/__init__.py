"""Python and torch around the model, outside of its files: what a run sets there and puts back, and what it refuses."""
