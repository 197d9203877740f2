"""How much memory there is, and how much this process has taken."""

from __future__ import annotations

import math
import os
import sys


def free_memory() -> float:
    """Return how many bytes of memory are free; infinity where the system does not say."""
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def most_memory() -> float:
    """Return how many bytes this process has held at most so far; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # on Windows
        return 0.0
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(found) if sys.platform == "darwin" else 1024.0 * found
