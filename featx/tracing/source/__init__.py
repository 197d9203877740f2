"""The source of the model: where running code is, what it calls and what it assigns."""
