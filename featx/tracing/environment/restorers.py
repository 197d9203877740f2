"""Run what puts the process back, all of it, also where one part of it raises."""

from __future__ import annotations

from collections.abc import Callable


def run_restorers(restorers: list[Callable[[], object]]) -> None:
    """Run `restorers`, the last one first, and take off the list those that have ended by themselves.

    Those that an interrupt has ended stay there, for a second call.

    Raises:
        BaseException: after all have run, the first error that one has raised; an interrupt before other errors.
    """
    raised: BaseException | None = None
    for place in reversed(range(len(restorers))):
        try:
            restorers[place]()
        except Exception as error:
            raised = error if raised is None else raised
        except BaseException as error:
            raised = error
            continue
        del restorers[place]
    try:
        if raised is not None:
            raise raised
    finally:
        raised = None  # it holds this frame
