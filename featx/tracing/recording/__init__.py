"""The graph of a running trace: its nodes and their names, and which node each value comes from."""
