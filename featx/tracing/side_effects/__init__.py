"""What forward changes and keeps, against what a graph of it would change and keep."""
