"""Further runs under other conditions: for which sizes, dtypes, modes and caches the graph of a trace holds."""
