"""The copy of the model that a trace runs: its modules and objects, and what forward changes on them."""
