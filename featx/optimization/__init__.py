"""Make extractors faster on the hardware at hand, with the error measured."""
