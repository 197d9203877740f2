"""The Python process around the model: what a trace sets there and puts back, and what it refuses."""
