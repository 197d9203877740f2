"""The command line: `featx nodes`, `draw`, `cost`, `code` and `features`, by typer (the extra `cli`)."""
