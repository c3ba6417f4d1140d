"""How much of what an episode had said before was found in an engine's cache, by the engine's own figures.

The prefix of a turn is all that the turns before it put in and sampled. Called by the report and the benchmarks; reads
only, over one open session.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, Protocol

from sqlmodel import Session, col, select

from storage.tables import Episode, Turn


class TurnTokens(Protocol):
    """What is read of a turn: `storage.tables.Turn` and `workflows.contracts.TurnRecord` both have it."""

    engine: str
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    min_version: int
    max_version: int


class CacheHits(NamedTuple):
    """Sums over the turns after the first. Example: of 1,000 prefix tokens 960 lie in whole blocks, and all of those
    were found: `prefix_share` is 0.96, `reachable_share` 1.0."""

    turns: int = 0
    prefix_tokens: int = 0
    reachable_tokens: int = 0
    """Those that can be found at all: an engine caches whole blocks, and never put the last sampled token in."""
    cached_tokens: int = 0
    """Those that were found, without what an engine found beyond the prefix because a sibling had seen it."""
    moved: int = 0
    """Turns at another engine than the turn before."""
    updated: int = 0
    """Turns under other weights than the turn before, for which nothing may be found."""
    first_turns: int = 0
    first_prompt_tokens: int = 0
    first_cached_tokens: int = 0
    """Found by first turns: the prompt, where a sibling had sent it before."""

    @property
    def prefix_share(self) -> float | None:
        return self.cached_tokens / self.prefix_tokens if self.prefix_tokens else None

    @property
    def reachable_share(self) -> float | None:
        return self.cached_tokens / self.reachable_tokens if self.reachable_tokens else None


def reachable(prefix_tokens: int, block_tokens: int) -> int:
    """Most tokens of a prefix that an engine with blocks of that size can have cached."""
    return max(0, prefix_tokens - 1) // block_tokens * block_tokens


def of_episodes(episodes: Iterable[Sequence[TurnTokens]], *, block_tokens: int) -> CacheHits:
    """Over the turns of each episode, which are in their order."""
    total = CacheHits()
    for turns in episodes:
        for first in turns[:1]:
            total = _plus(total, CacheHits(0, 0, 0, 0, 0, 0, 1, first.prompt_tokens, first.cached_tokens))
        for before, turn in pairwise(turns):
            prefix = before.prompt_tokens + before.sampled_tokens
            within = reachable(prefix, block_tokens)
            moved, updated = turn.engine != before.engine, turn.min_version != before.max_version
            found = min(turn.cached_tokens, within)
            total = _plus(total, CacheHits(1, prefix, within, found, int(moved), int(updated)))
    return total


def of_run(opened: Session, *, run: str, block_tokens: int) -> CacheHits:
    """Over all attempts of a run; `block_tokens` is its engines' block size (activities/generation/server.py)."""
    statement = (
        select(Turn)
        .join(Episode, col(Turn.episode) == Episode.id)
        .where(Episode.run == run)
        .order_by(col(Turn.episode), col(Turn.turn))
    )
    attempts = groupby(opened.exec(statement), key=lambda turn: turn.episode)
    return of_episodes((list(turns) for _, turns in attempts), block_tokens=block_tokens)


def _plus(one: CacheHits, other: CacheHits) -> CacheHits:
    return CacheHits(*map(operator.add, one, other))
