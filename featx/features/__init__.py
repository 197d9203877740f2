"""Names, extractors, and what they are made of."""
