"""How fast the machine is, while something else is timed on it.

Shared and throttled machines change their speed by a factor of two within the hour: two runs that are timed one after
the other differ by that alone. A thread times the same few milliseconds of arithmetic again and again, by its own
processor time, so that waiting for a core does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

EVERY_S = 2.0
ROUNDS = 100_000


@dataclass
class Pace:
    samples: list[tuple[float, float]] = field(default_factory=list)
    """(unix time, processor seconds that the arithmetic took)."""

    def cost(self, spans: list[tuple[float, float]]) -> float:
        """Mean processor seconds within these spans of unix time. Raises StatisticsError where no sample is in any."""
        return fmean(cost for at, cost in self.samples if any(begin <= at <= end for begin, end in spans))


@contextmanager
def measured() -> Iterator[Pace]:
    pace, over = Pace(), threading.Event()

    def sample() -> None:
        while not over.wait(EVERY_S):
            pace.samples.append((time.time(), _arithmetic()))

    thread = threading.Thread(target=sample, name="pace", daemon=True)
    thread.start()
    try:
        yield pace
    finally:
        over.set()
        thread.join()


def _arithmetic() -> float:
    began, total = time.thread_time(), 0
    for number in range(ROUNDS):
        total += number * number
    return time.thread_time() - began
