"""Build an extractor: trace the model in each mode, cut out what is requested, and make further graphs."""
