"""How many sandboxes to hold ready: pure rules over when they were asked for.

A group's siblings come in one moment, so a mean rate says too little: what counts is the most that came within the time
in which the pool can make up for it. Called by `WarmPool`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HISTORY_S = 300.0
"""What was asked for longer ago says nothing about the next minutes."""
FLOOR = 8
"""Held of the kind that was asked for last, though nobody asked for long: a group comes whole, and one that waits costs
some 3 MB."""


@dataclass(frozen=True)
class Water:
    """Below `low` the pool starts sandboxes; above `high` the oldest go."""

    low: int
    high: int


def peak(arrivals: Sequence[float], window_s: float) -> int:
    """The most arrivals within any `window_s` seconds; `arrivals` are in order.

    Example: peak([0.0, 0.1, 0.2, 9.0], 1.0) == 3."""
    most = first = 0
    for last, at in enumerate(arrivals):
        while at - arrivals[first] > window_s:
            first += 1
        most = max(most, last - first + 1)
    return most


def waters(peaks: Mapping[str, int], bound: int) -> dict[str, Water]:
    """The water of each key; `peaks` begins with the one that was asked for last, which is served first. The lows
    together stay within `bound`."""
    found: dict[str, Water] = {}
    for key, most in peaks.items():
        low = min(max(most, 0 if found else FLOOR), bound - sum(water.low for water in found.values()))
        found[key] = Water(low, min(2 * low, bound))
    return found
