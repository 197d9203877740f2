"""Conversions to and from the graphs of other packages."""
