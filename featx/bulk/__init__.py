"""Features of whole data sets on disk: read, computed and written in shards, which a killed job finds again."""
