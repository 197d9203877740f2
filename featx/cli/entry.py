"""Start the command line, or say how to install it."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    """Run the command line with the arguments of the process."""
    if importlib.util.find_spec("typer") is None:
        sys.exit("featx: the command line needs typer: pip install 'featx[cli]'")
    from featx.cli.commands import make_app

    make_app()(prog_name="featx")
