"""Say what values a model has: layouts, channels, strides, the table of all nodes, and stages."""
