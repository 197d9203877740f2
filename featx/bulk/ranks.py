"""Which share of a job this process does: from arguments, torchrun, Slurm arrays or Kubernetes indices."""

from __future__ import annotations

import os
from collections.abc import Mapping

from featx.errors import ArgumentTypeError

_VARIABLES = (
    ("RANK", "WORLD_SIZE", 0),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", 0),
)


def share_of(rank: int | None, world_size: int | None, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of this process and how many there are, by default what a launcher says, or one alone.

    `JOB_COMPLETIONS` is not set by Kubernetes itself; a manifest has to give it.

    Raises:
        ArgumentTypeError: one of the two is missing, or they do not fit.
    """
    if rank is None and world_size is None:
        for number, count, first in _VARIABLES:
            if number in environment and count in environment:
                start = int(environment.get(first, 0)) if isinstance(first, str) else first
                rank, world_size = int(environment[number]) - start, int(environment[count])
                break
        else:
            rank, world_size = 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ArgumentTypeError(f"rank and world_size must be given together, as in 0 of 8; got {rank} of {world_size}")
    return rank, world_size
