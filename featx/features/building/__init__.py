"""Build an extractor: trace the model in each mode, cut out what is wanted, and make further graphs."""
