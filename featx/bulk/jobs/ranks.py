"""Which share of a job this process does: from arguments, torchrun, Slurm arrays or Kubernetes indices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from featx.errors import ArgumentTypeError

_VARIABLES = (
    ("RANK", "WORLD_SIZE", 0),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", 0),
)
_ALONE = "rank=0, world_size=1 (--rank 0 --world 1) does all of the job here"


class Share(NamedTuple):
    """The number of this process, how many there are, and the environment variable that says so, if one does."""

    rank: int
    world_size: int
    origin: str = ""

    def __str__(self) -> str:
        place = f"the part of process {self.rank} of {self.world_size}"
        return f"{place}, as the environment variable {self.origin} says; {_ALONE}" if self.origin else place


def share_of(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> Share:
    """Return the share of this process, by default what a launcher says, or all of the job.

    `JOB_COMPLETIONS` is not set by Kubernetes itself; a manifest has to give it.

    Raises:
        ArgumentTypeError: one of the two is missing, or they do not fit.
    """
    if rank is None and world_size is None:
        return _share_of_environment(environment)
    if type(rank) is not int or type(world_size) is not int:
        raise ArgumentTypeError(
            f"rank and world_size must be given together, as in 0 of 8; got {rank!r} of {world_size!r}"
        )
    if not 0 <= rank < world_size:
        raise ArgumentTypeError(f"with world_size={world_size} rank is a number from 0 to {world_size - 1}, got {rank}")
    return Share(rank, world_size)


def _share_of_environment(environment: Mapping[str, str]) -> Share:
    for number, count, first in _VARIABLES:
        if number not in environment or count not in environment:
            continue
        try:
            start = int(environment.get(first, 0)) if isinstance(first, str) else first
            share = Share(int(environment[number]) - start, int(environment[count]), number)
        except ValueError:
            share = None
        if share is None or not 0 <= share.rank < share.world_size:
            raise ArgumentTypeError(
                f"the environment variables {number}={environment[number]} and {count}={environment[count]} do not say "
                f"which of how many processes this is (an array of Slurm counts up by 1); give rank and world_size, or "
                f"{_ALONE}"
            )
        return share
    return Share(0, 1)
