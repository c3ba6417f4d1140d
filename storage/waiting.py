"""`time/to_trainable_batch` of a batch: what its wait was made of, and who caused the tail.

The wait of a batch begins when the previous one was cut, or when admission opened if that was later (the start of a
run; in sync mode the end of the update), and ends when an eligible batch is complete. The time from there to the cut is
the trainer's, not the collection's, and is no part of it.

Each episode of the batch divides that same wait into eight parts without gap or overlap, so their means over the batch
add up to it exactly:

- `queue`: its group had not been admitted yet, or an activity of it waited for a worker or a slot;
- `boot`: its sandbox was being made or replayed; not the part that its first generation hides;
- `generate`, `act`, `verify`: these activities ran;
- `other`: attempts before it that infrastructure broke, activities that were tried again, workflow tasks, its row;
- `wait_for_siblings`: it had ended, its group was not closed;
- `wait_for_batch`: its group had closed, the batch was not complete.

An episode that began before the wait did counts only what lies within: its parts are taken in proportion to the share
of its life that does. An episode whose recorded times are longer than its life is scaled to it.

The tail is the time for which the last 5 % of the episodes (one at least) kept the batch waiting. The group that closed
last caused it; the attempt of that group which ended last has its own eight parts, which add up to the wait too.
`gpu_hours/waiting_on_env` is the time for which the run's GPUs, of engines and trainer together, waited on the
environment: over all batches the wait, times the GPUs, times the share that its episodes spent on anything of it but
`generate` and what is nobody's cause (`other`, `wait_for_batch`). Each second of a wait is divided among the episodes
of the batch evenly, so the causes add up; where other episodes' generation filled the time, an engine did less waiting
than this says. Called by the reservation of a batch and by the report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from sqlalchemy import ColumnElement
from sqlmodel import Session, col, select

from storage.tables import Episode, Group, Turn
from workflows.contracts import BatchWait, EpisodeKind, Outcome

PARTS = ("queue", "boot", "generate", "act", "verify", "other", "wait_for_siblings", "wait_for_batch")
CAUSES = {"boot": "boot", "act": "act", "verify": "verify", "queue": "queue", "siblings": "wait_for_siblings"}
"""Causes of `gpu_hours/waiting_on_env`, and the part of the wait that each is."""
TAIL = 0.05
"""Share of a batch's episodes that are its tail."""


@dataclass(frozen=True)
class Way:
    """One attempt's recorded times: moments in seconds since the epoch, the rest seconds."""

    attempt_id: str
    group_id: str
    admitted_at: float
    """When its group began."""
    started_at: float
    ended_at: float
    closed_at: float
    """When its group closed."""
    queue: float = 0.0
    boot: float = 0.0
    hidden: float = 0.0
    """Of `boot`, the seconds in which its first generation ran or waited as well."""
    generate: float = 0.0
    act: float = 0.0
    verify: float = 0.0


def parts_of(way: Way, opened_at: float, complete_at: float) -> dict[str, float]:
    """The wait from `opened_at` to `complete_at` as this attempt divides it; the parts add up to it."""
    end = max(complete_at, opened_at)
    moments = [opened_at]
    for moment in (way.admitted_at, way.started_at, way.ended_at, way.closed_at):
        moments.append(min(max(moment, moments[-1]), end))
    _, admitted, started, ended, closed = moments
    worked = {
        "queue": way.queue,
        "boot": max(0.0, way.boot - way.hidden),
        "generate": way.generate,
        "act": way.act,
        "verify": way.verify,
    }
    length = max(way.ended_at - way.started_at, sum(worked.values()))
    within = (ended - started) / length if length > 0 else 0.0
    parts = {name: seconds * within for name, seconds in worked.items()}
    parts["other"] = max(0.0, ended - admitted - sum(parts.values()))
    parts["queue"] += admitted - opened_at
    return parts | {"wait_for_siblings": closed - ended, "wait_for_batch": end - closed}


def batch_wait(members: Sequence[Way], last_group: Sequence[Way], *, opened_at: float, complete_at: float) -> BatchWait:
    """The wait of a batch of `members`. `last_group`: the attempts that its group which closed last had waited for."""
    complete_at = max(complete_at, opened_at)
    seconds = complete_at - opened_at
    if not members:
        return BatchWait(seconds=seconds)
    divided = [parts_of(way, opened_at, complete_at) for way in members]
    ends = sorted(min(max(way.ended_at, opened_at), complete_at) for way in members)
    before_tail = min(math.ceil((1 - TAIL) * len(ends)), len(ends) - 1)
    tail_from = ends[before_tail - 1] if before_tail else opened_at
    last = max(last_group or members, key=lambda way: (way.ended_at, way.attempt_id))
    return BatchWait(
        seconds=seconds,
        parts={name: fmean(parts[name] for parts in divided) for name in PARTS},
        median_s=median(ends) - opened_at,
        tail_s=complete_at - tail_from,
        tail_group=last.group_id,
        tail_attempt=last.attempt_id,
        tail_parts=parts_of(last, opened_at, complete_at),
    )


def gpu_hours_waiting(waits: Iterable[Mapping[str, float]], *, gpus: float) -> dict[str, float]:
    """`gpu_hours/waiting_on_env` by cause, in GPU-hours. `waits`: the parts of each batch's wait in seconds; `gpus`:
    how many waited. Example: of a wait whose episodes ran commands for 90 s on average, 8 GPUs waited 0.2 GPU-hours
    for `act`."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    for parts in waits:
        for cause, part in CAUSES.items():
            seconds[cause] += parts.get(part, 0.0)
    return {cause: gpus * value / 3600 for cause, value in seconds.items()}


def wait_of(
    opened: Session, *, groups: Sequence[tuple[str, Sequence[str]]], opened_at: float, complete_at: float
) -> BatchWait:
    """The wait of a batch from its rows. `groups`: (group id, attempts of it that are to train)."""
    rows = opened.exec(select(Group).where(col(Group.id).in_([group_id for group_id, _ in groups]))).all()
    closed = {row.id: row for row in rows}
    members = _ways(opened, closed, col(Episode.id).in_([attempt for _, members in groups for attempt in members]))
    last = max(rows, key=lambda row: (row.closed_at, row.number), default=None)
    rest = _ways(opened, closed, col(Episode.group_id) == last.id) if last else []
    in_time = [way for way in rest if way.ended_at <= way.closed_at]
    return batch_wait(members, in_time, opened_at=opened_at, complete_at=complete_at)


def _ways(opened: Session, groups: dict[str, Group], which: ColumnElement[bool]) -> list[Way]:
    """The training attempts in question, but for those that were surplus."""
    rows = opened.exec(
        select(Episode, Turn)
        .join(Turn, (col(Turn.episode) == Episode.id) & (col(Turn.turn) == 0), isouter=True)
        .where(which, Episode.kind == EpisodeKind.TRAIN, Episode.outcome != Outcome.SURPLUS)
    ).all()
    return [_way(episode, first, groups[episode.group_id]) for episode, first in rows]


def _way(episode: Episode, first: Turn | None, group: Group) -> Way:
    first_turn = first.generate_s + first.queue_s if first is not None else 0.0
    return Way(
        attempt_id=episode.id,
        group_id=episode.group_id,
        admitted_at=group.started_at,
        started_at=episode.started_at,
        ended_at=episode.ended_at,
        closed_at=group.closed_at,
        queue=episode.queue_s,
        boot=episode.boot_s,
        hidden=min(episode.boot_s, first_turn),
        generate=episode.generate_s,
        act=episode.act_s,
        verify=episode.verify_s,
    )
