"""Errors that are the user's, which are told without a traceback."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path

import typer

from featx.errors import FeatxError

# What messages call in Python, and how one gets the same by the command line.
_IN_OPTIONS = {r"featx\.get_graph_node_names\(model\)": "'featx nodes MODEL --all'"}
# The same for commands that have `--input`.
_OF_INPUTS = {
    "example_inputs with which it runs": "--input once for each of its inputs, as in --input 1x3x64x64",
    r"example_inputs(=\S+)?": "--input",
    "as in a call of the model": "by --input",
}


class UserError(Exception):
    """What somebody has typed cannot be done; the message says why, and what to do."""


def check_output(path: Path, suffixes: Collection[str]) -> None:
    """Raise unless a file can be written there, before the work that makes it.

    Raises:
        UserError: its name ends in none of `suffixes`, or its folder is not there.
    """
    if path.suffix.lower() not in suffixes:
        raise UserError(f"'{path}' must end in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder '{path.parent}' to write '{path.name}' to; make it first")


@contextmanager
def of_model(inputs: str) -> Generator[None]:
    """Tell errors that a model raises on some inputs in a line.

    Raises:
        UserError: the model has failed.
    """
    try:
        yield
    except (UserError, FeatxError, OSError, MemoryError):
        raise
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        raise UserError(f"the model fails on {inputs}: {type(error).__name__}: {first}") from error


def in_options(text: str, *, takes_inputs: bool) -> str:
    """Return a message that speaks of Python's arguments with the names of options instead."""
    for words, option in (_IN_OPTIONS | (_OF_INPUTS if takes_inputs else {})).items():
        text = re.sub(words, option, text)
    return text


@contextmanager
def told(*, takes_inputs: bool = False) -> Generator[None]:
    """Print errors of the user's as one line, and exit with 1; `takes_inputs` is for commands that have `--input`."""
    try:
        yield
    except (UserError, FeatxError, OSError) as error:
        logging.getLogger("featx").debug("", exc_info=True)
        typer.secho(f"featx: {in_options(str(error), takes_inputs=takes_inputs)}", err=True, fg="red")
        raise typer.Exit(1) from None
    except Exception as error:
        if not type(error).__module__.startswith("botocore."):
            raise
        typer.secho(f"featx: the object store cannot be reached: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
