"""Put things that must wait for each other in an order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def first_order(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the numbers below `count` so that the first of each edge comes before the second.

    Otherwise the smaller one comes first. Those in a cycle, and those that wait for one, are missing.
    O(edges + count * log(count)).
    """
    waiting = [0] * count
    later: list[list[int]] = [[] for _ in range(count)]
    for first, second in edges:
        waiting[second] += 1
        later[first].append(second)
    ready = [number for number, others in enumerate(waiting) if others == 0]
    order: list[int] = []
    while ready:
        order.append(number := heapq.heappop(ready))
        for other in later[number]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, other)
    return order
