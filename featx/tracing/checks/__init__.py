"""Checks after the trace of an example: state that outlives the call, and which sizes and dtypes may differ."""
