"""Find something of a model in train and in eval mode, once where no code asks for the mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from featx.features.building.tracing import ModelTracing

_Found = TypeVar("_Found")


def in_each_mode(tracing: ModelTracing, find: Callable[[], _Found]) -> tuple[dict[bool, _Found], dict[bool, Exception]]:
    """Return what `find` returns in eval and in train mode, and the errors where it raises, the model's own too.

    It is one object for both modes if no code asks in which one it runs. To see that, modules have no attribute
    `training` in the first attempt.
    """
    found: dict[bool, _Found] = {}
    errors: dict[bool, Exception] = {}
    with tracing.in_mode(False), tracing.recording_mode_reads() as reads, suppress(Exception):
        found[False] = find()
    if found and not reads.any and not tracing.inputs.is_for_one_mode:
        return {False: found[False], True: found[False]}, {}
    for training in (False, True):
        if training in found:
            continue
        try:
            with tracing.in_mode(training):
                found[training] = find()
        except Exception as error:  # such as for a batch of one sample, or for targets that are missing
            errors[training] = error
    return found, errors
