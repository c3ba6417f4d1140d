"""When what is hit: a schedule that depends on its seed alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Hit:
    at_s: float
    """Seconds after the run's first step began to be collected."""
    kind: str


def draw_schedule(seed: int, kinds: list[str], every_s: float, first: Collection[str] = ()) -> Iterator[Hit]:
    """Endless. Rounds in which each kind comes once, in a new order; pauses of half to one and a half `every_s`.
    `first` come before the others in the first round."""
    rng = random.Random(f"chaos/{seed}")
    at_s = 0.0
    for number in itertools.count():
        order = rng.sample(kinds, len(kinds))
        for kind in order if number else sorted(order, key=lambda kind: kind not in first):
            at_s += every_s * rng.uniform(0.5, 1.5)
            yield Hit(round(at_s, 1), kind)
