"""Which engine a request goes to: the one that holds its prefix, unless that has too much to do already.

Two rules, both pure and without memory, so that any worker comes to the same answer.

A first turn has its prompt in common with its siblings: they start where rendezvous hashing puts the prompt, and
overflow together to the next engine in the prompt's order (consistent hashing with bounded loads). The bound is
BALANCE times the mean load: at 1.25 the fullest engine is at most a quarter above the mean, at the price of one prompt
computed twice for a group that is torn; a smaller factor tears more groups, a larger one lets the slowest engine set
the pace. Below QUIET requests an engine is never full: it would tear every group of an idle system for nothing.

A later turn stays with the engine that holds its cache, and waits for room there for PATIENCE_S before it goes where
there is room: when all engines are full, a slot elsewhere is better used by whoever has a cache there. Where its cache
is gone, because the engine is lost or has new weights, it is placed like a first turn; it then stays where it went.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

BALANCE = 1.25
QUIET = 8
PATIENCE_S = 5.0


class Load(NamedTuple):
    """One engine in rotation. Example: `Load("local-e0", requests=12, room=True)`."""

    engine: str
    requests: int
    """In flight: this worker's, and those of others that the engine itself tells of."""
    room: bool
    """Whether this worker may send it another one."""


def order(prefix: str, engines: Sequence[str]) -> list[str]:
    """The engines in this prefix's order of preference. Losing one moves only the prefixes that preferred it."""
    return sorted(engines, key=lambda engine: _weight(prefix, engine), reverse=True)


def bound(loads: Sequence[Load]) -> int:
    """The most requests that one of these engines takes, the next one counted."""
    mean = (sum(load.requests for load in loads) + 1) / len(loads)
    return max(QUIET, math.ceil(BALANCE * mean))


def place(prefix: str, loads: Sequence[Load]) -> str | None:
    """Where a request without a cache goes: the first in its order within the bound. None while there is no room.

    Where those within the bound have no room for it, as an engine under pressure, the least loaded of the others takes
    it: nobody waits beside an engine that has room.
    """
    open_ones = {load.engine: load for load in loads if load.room}
    if not open_ones:
        return None
    most = bound(loads)
    preferred = [open_ones[engine] for engine in order(prefix, list(open_ones))]
    within = (load for load in preferred if load.requests < most)
    return next(within, min(preferred, key=lambda load: load.requests)).engine


def return_to(engine: str, prefix: str, loads: Sequence[Load], *, waited_s: float) -> str | None:
    """Where a request with a cache at `engine`, which is one of `loads`, goes. None while it should wait."""
    if any(load.engine == engine and load.room for load in loads):
        return engine
    return place(prefix, loads) if waited_s >= PATIENCE_S else None


def _weight(prefix: str, engine: str) -> bytes:
    return hashlib.sha256(f"{prefix}\0{engine}".encode()).digest()
