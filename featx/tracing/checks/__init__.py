"""Checks after the trace of an example: a second call must do the same; what follows a trace that stopped early."""
