"""What the source of the model says about writes: which arguments and which state code may change."""
