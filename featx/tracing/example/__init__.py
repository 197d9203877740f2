"""The example tracer: run `forward` on an example and record what it does."""
