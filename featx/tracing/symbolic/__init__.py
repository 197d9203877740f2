"""The symbolic tracer: run `forward` on proxies, without an example."""
