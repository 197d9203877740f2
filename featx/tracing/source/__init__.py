"""What the code of a model says beyond the calls that a trace sees: where a value goes, what may be written."""
