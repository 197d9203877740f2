"""The globals of the model's Python files: what a run puts in their place, follows in them, and puts back."""
