"""Further runs under other conditions: for which sizes, dtypes and modes the graph of a trace holds."""
