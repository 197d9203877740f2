"""What the source of the model says about uses: what a line does with a value, a key or a slice."""
