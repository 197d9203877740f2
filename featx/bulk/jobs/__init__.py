"""Jobs: what is computed, divided into shards, and who does it."""
