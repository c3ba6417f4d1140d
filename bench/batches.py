"""From what was recorded of a collection to the figures that are compared; the same for the baseline and for ours.

Pure. `Collection` holds times in seconds after the start. A group is complete when all its siblings have ended validly,
whether or not their rewards differ: the baseline has no idea of signal, so what is compared asks for none. Called by
collection.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, quantiles

BLOCK_TOKENS = 32
TAIL = 0.05


@dataclass(frozen=True)
class TurnUse:
    """The engine's usage of one turn. `prefix`: the prompt and the answer of the turn before, 0 in the first."""

    prefix: int
    cached: int
    sampled: int


@dataclass(frozen=True)
class EpisodeUse:
    """One valid episode: its group's number, when it ended, its turns."""

    group: int
    ended_s: float
    turns: Sequence[TurnUse]


@dataclass
class Collection:
    """`closed_s`: when each complete group was, by number. `began`: groups that began before the batch was complete.
    `idle`: share of the time in which an engine had no request, the mean over engines; `cpu_busy`: of the processors'
    time, the share in which they worked. `lead_s`: the product's own
    `time/to_trainable_batch`, which wants groups that can train."""

    closed_s: Mapping[int, float]
    episodes: Sequence[EpisodeUse]
    idle: float
    cpu_busy: float = 0.0
    by_number: bool = False
    began: int = 0
    lead_s: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


def batch_ends(closed_s: Mapping[int, float], groups: int, batches: int, *, by_number: bool) -> list[float]:
    """When each batch of so many groups was complete: those that were complete first, or those that began first.

    Raises ValueError where fewer groups were complete."""
    if len(closed_s) < groups * batches:
        raise ValueError(f"{len(closed_s)} complete groups are fewer than {groups * batches}")
    if not by_number:
        return [sorted(closed_s.values())[groups * (index + 1) - 1] for index in range(batches)]
    in_order = [closed_s[number] for number in sorted(closed_s)]
    return [max(in_order[: groups * (index + 1)]) for index in range(batches)]


def members(closed_s: Mapping[int, float], groups: int, *, by_number: bool) -> list[int]:
    """The numbers of the groups that make the first so many."""
    order: Callable[[int], float] = (lambda number: number) if by_number else (lambda number: closed_s[number])
    return sorted(closed_s, key=order)[:groups]


def figures(found: Collection, groups: int, batches: int, slow: Callable[[int], bool]) -> dict[str, float]:
    """Seconds per batch and its tail, cache hit rates, idle share, and how the batch differs from what was admitted."""
    ends = batch_ends(found.closed_s, groups, batches, by_number=found.by_number)
    taken = members(found.closed_s, groups * batches, by_number=found.by_number)
    turns = [turn for episode in found.episodes for turn in episode.turns]
    ended = [episode.ended_s for episode in found.episodes if episode.group in taken]
    values = {
        "seconds": ends[-1] / batches,
        "tail_s": tail_s(ended, ends[-1]),
        "hit_rate": hit_rate(turns),
        "hit_rate_blocks": hit_rate(turns, block=BLOCK_TOKENS),
        "engine_idle": found.idle,
        "cpu_busy": found.cpu_busy,
        "turns": mean(len(episode.turns) for episode in found.episodes),
        "turns_p95": _p95(len(episode.turns) for episode in found.episodes),
        "tokens": mean(sum(turn.sampled for turn in episode.turns) for episode in found.episodes),
        "slow_share": mean(float(slow(number)) for number in taken),
        "slow_admitted": mean(float(slow(number)) for number in range(max(found.began, len(taken)))),
    }
    if found.lead_s is not None:
        values["lead_s"] = found.lead_s
    return values | {f"time/{name}": value for name, value in found.parts.items()}


def tail_s(ended_s: Sequence[float], end_s: float) -> float:
    """Seconds for which the last 5 % of the episodes, one at least, kept a batch waiting that ended at `end_s`."""
    before = len(ended_s) - max(1, round(TAIL * len(ended_s)))
    return end_s - sorted(ended_s)[before - 1] if before > 0 else end_s


def hit_rate(turns: Iterable[TurnUse], *, block: int = 1) -> float:
    """Of the tokens that the turn before left behind, those that the engine found in its cache; of whole blocks of
    `block` tokens where given, since a cache holds no parts of one. First turns have none. 0.0 without later turns."""
    later = [turn for turn in turns if turn.prefix >= block]
    known = sum(turn.prefix // block * block for turn in later)
    return sum(min(turn.cached, turn.prefix // block * block) for turn in later) / known if known else 0.0


def _p95(counts: Iterable[int]) -> float:
    values = sorted(counts)
    return float(quantiles(values, n=20)[-1]) if len(values) > 1 else float(values[0])
