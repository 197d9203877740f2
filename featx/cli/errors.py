"""Errors that are the user's, which are told without a traceback."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import typer

from featx.errors import FeatxError


class UserError(Exception):
    """What somebody has typed cannot be done; the message says why, and what to do."""


@contextmanager
def told() -> Generator[None]:
    """Print errors of the user's as one line, and exit with 1."""
    try:
        yield
    except (UserError, FeatxError, OSError) as error:
        typer.secho(f"featx: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    except Exception as error:
        if not type(error).__module__.startswith("botocore."):
            raise
        typer.secho(f"featx: the object store cannot be reached: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
