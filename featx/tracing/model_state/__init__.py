"""What `forward` changes on the modules of a model and on their attributes, and how it is noticed and put back."""
