"""What the lineage adds up to over a run: counts, means and series. Reads only, keyword-only, over one open session.

Called by the report and the command line. Means are over valid episodes (those with a reward).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, NamedTuple

import sqlalchemy
from sqlalchemy import case, distinct, func, not_
from sqlmodel import Session, col, select

from storage.quarantine import in_quarantine
from storage.tables import (
    VOID,
    Batch,
    BatchMember,
    EngineLoad,
    Episode,
    Evaluation,
    PolicyVersion,
    Publication,
    Task,
    Turn,
)
from workflows.contracts import EpisodeKind, Outcome

BUCKETS = 24


class KindCount(NamedTuple):
    """Training attempts on one kind of task."""

    kind: str
    episodes: int
    valid: int
    mean_reward: float | None


class VersionReward(NamedTuple):
    """Valid training episodes by the version that made their last token, whether they trained or not."""

    version: int
    episodes: int
    mean_reward: float


class BatchSize(NamedTuple):
    episodes: int
    groups: int
    mean_reward: float


class Bucket(NamedTuple):
    """Endings of training attempts within a slice of the run; seconds since the run's start."""

    from_s: float
    to_s: float
    outcomes: dict[str, int]


def batches(opened: Session, *, run: str) -> list[Batch]:
    """The run's updates in the order of their steps, each with its metrics and waiting times; void ones are none."""
    return list(opened.exec(select(Batch).where(Batch.run == run, Batch.state != VOID).order_by(col(Batch.step))).all())


def void_batches(opened: Session, *, run: str) -> list[Batch]:
    """Batches that taught nothing, oldest first; `reason` says why."""
    statement = select(Batch).where(Batch.run == run, Batch.state == VOID).order_by(col(Batch.reserved_at))
    return list(opened.exec(statement).all())


def metric(rows: list[Batch], *, name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric of the update, for the steps that have it."""
    return [(row.step, float(row.metrics[name])) for row in rows if row.metrics.get(name) is not None]


def batch_sizes(opened: Session, *, run: str) -> dict[str, BatchSize]:
    """What each batch of the run holds, by batch id."""
    rows = opened.exec(
        select(
            BatchMember.batch,
            func.count(),
            func.count(distinct(col(BatchMember.group_id))),
            func.avg(Episode.reward),
        )
        .join(Episode, col(BatchMember.episode) == Episode.id)
        .where(Episode.run == run)
        .group_by(BatchMember.batch)
    ).all()
    return {batch: BatchSize(episodes, groups, float(reward or 0.0)) for batch, episodes, groups, reward in rows}


def evaluations(opened: Session, *, run: str) -> list[Evaluation]:
    """First to last: the report's `evaluation.first` and `evaluation.last` are its ends."""
    return list(opened.exec(select(Evaluation).where(Evaluation.run == run).order_by(col(Evaluation.version))).all())


def publications(opened: Session, *, run: str) -> list[tuple[Publication, list[EngineLoad]]]:
    """Each published version with its loads, engines in the order of their names."""
    loads: dict[int, list[EngineLoad]] = defaultdict(list)
    for load in opened.exec(select(EngineLoad).where(EngineLoad.run == run).order_by(col(EngineLoad.engine))).all():
        loads[load.version].append(load)
    rows = opened.exec(select(Publication).where(Publication.run == run).order_by(col(Publication.version))).all()
    return [(row, loads[row.version]) for row in rows]


def slowest_load(loads: list[EngineLoad]) -> dict[str, float]:
    """The parts of the proven load that took longest; empty where none is proven."""
    proven = ({part: float(value) for part, value in load.seconds.items()} for load in loads if load.proven)
    return max(proven, key=lambda parts: sum(parts.values()), default={})


def publish_latency(row: Publication, loads: list[EngineLoad]) -> float:
    """`weight_sync/publish_latency_s` of a version: seconds from the update's end to the proof of the slowest engine.

    By the parts' own clocks: a row of a load says when the engine loaded it last, which may be much later."""
    published = float(row.seconds.get("total", sum(row.seconds.values())))
    return published + sum(slowest_load(loads).values())


def outcomes(opened: Session, *, run: str) -> dict[str, dict[str, int]]:
    """Attempts by use and outcome, replaced ones too."""
    return _counted(opened, run, Episode.outcome)


def stop_reasons(opened: Session, *, run: str) -> dict[str, dict[str, int]]:
    """Attempts by use and stop reason, replaced ones too."""
    return _counted(opened, run, Episode.stop_reason)


def _counted(opened: Session, run: str, column: Any) -> dict[str, dict[str, int]]:
    statement = select(Episode.kind, column, func.count()).where(Episode.run == run).group_by(Episode.kind, column)
    counts: dict[str, dict[str, int]] = {}
    for use, value, count in sorted(opened.exec(statement).all()):
        counts.setdefault(use, {})[value] = count
    return counts


def outcomes_over_time(opened: Session, *, run: str, started_at: float) -> list[Bucket]:
    """Endings of training attempts in equal slices of time; none where nothing has ended."""
    rows = opened.exec(
        select(Episode.ended_at, Episode.outcome).where(Episode.run == run, Episode.kind == EpisodeKind.TRAIN)
    ).all()
    if not rows:
        return []
    length = max(max(ended for ended, _ in rows) - started_at, 1.0) / BUCKETS
    counts: list[Counter[str]] = [Counter() for _ in range(BUCKETS)]
    for ended, outcome in rows:
        counts[min(BUCKETS - 1, max(0, int((ended - started_at) / length)))][outcome] += 1
    return [
        Bucket(index * length, (index + 1) * length, {name: count[name] for name in Outcome})
        for index, count in enumerate(counts)
    ]


def reward_by_version(opened: Session, *, run: str) -> list[VersionReward]:
    """Without what is in quarantine."""
    rows = opened.exec(
        select(Episode.max_version, func.count(), func.avg(Episode.reward))
        .where(Episode.run == run, Episode.kind == EpisodeKind.TRAIN)
        .where(col(Episode.reward).is_not(None), col(Episode.max_version).is_not(None), not_(in_quarantine()))
        .group_by(col(Episode.max_version))
        .order_by(col(Episode.max_version))
    ).all()
    return [VersionReward(int(version or 0), count, float(reward)) for version, count, reward in rows]


def episodes_by_kind(opened: Session, *, run: str) -> list[KindCount]:
    """What is in quarantine is an attempt, but neither valid nor in the mean."""
    reward = case((in_quarantine(), None), else_=col(Episode.reward))
    # SQLAlchemy's own select: SQLModel types at most four columns.
    statement = (
        sqlalchemy.select(col(Task.kind), func.count(), func.count(reward), func.avg(reward))
        .join(Task, col(Episode.task) == Task.id, isouter=True)
        .where(col(Episode.run) == run, col(Episode.kind) == EpisodeKind.TRAIN)
        .group_by(col(Task.kind))
        .order_by(col(Task.kind))
    )
    rows = opened.connection().execute(statement).all()
    return [KindCount(kind or "", total, valid, reward) for kind, total, valid, reward in rows]


class Tokens(NamedTuple):
    """Over all turns of a run: sampled, prompt, and those of the prompt that an engine had in its cache."""

    sampled: int
    prompt: int
    cached: int


def tokens(opened: Session, *, run: str) -> Tokens:
    sums = (func.sum(Turn.sampled_tokens), func.sum(Turn.prompt_tokens), func.sum(Turn.cached_tokens))
    statement = select(*sums).join(Episode, col(Turn.episode) == Episode.id).where(Episode.run == run)
    sampled, prompt, cached = opened.exec(statement).one()
    return Tokens(int(sampled or 0), int(prompt or 0), int(cached or 0))


class Failure(NamedTuple):
    """Attempts that no fault of the model ended, alike in where and why."""

    stop_reason: str
    why: str
    attempts: int
    example: str
    """One of the attempts, by id."""


def failures(opened: Session, *, run: str, most: int = 10) -> list[Failure]:
    """The commonest first."""
    statement = (
        select(Episode.stop_reason, Episode.why, func.count(), func.max(Episode.id))
        .where(Episode.run == run, col(Episode.outcome).in_((Outcome.INFRA_FAILURE, Outcome.UNKNOWN)))
        .group_by(Episode.stop_reason, Episode.why)
        .order_by(func.count().desc(), Episode.why)
        .limit(most)
    )
    return [Failure(*row) for row in opened.exec(statement).all()]


class VersionRow(NamedTuple):
    """A version and what made it: its batch, that batch's size (None for the first version), its evaluation's mean."""

    version: int
    batch: str | None
    size: BatchSize | None
    held_out: float | None
    published_bytes: int | None
    checkpoint: str


def versions(opened: Session, *, run: str) -> list[VersionRow]:
    """The run's versions, first to last."""
    sizes = batch_sizes(opened, run=run)
    held_out = {row.version: row.mean_reward for row in evaluations(opened, run=run)}
    published = {row.version: row.bytes for row, _ in publications(opened, run=run)}
    statement = select(PolicyVersion).where(PolicyVersion.run == run).order_by(col(PolicyVersion.version))
    return [
        VersionRow(
            version=row.version,
            batch=row.batch,
            size=sizes.get(row.batch or ""),
            held_out=held_out.get(row.version),
            published_bytes=published.get(row.version),
            checkpoint=row.checkpoint,
        )
        for row in opened.exec(statement).all()
    ]
