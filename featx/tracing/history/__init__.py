"""What is noted of the objects and calls of a running trace: where they come from, and who has written them."""
