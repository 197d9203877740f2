"""The copy of the model that a trace runs: its modules and the objects that they hold."""
