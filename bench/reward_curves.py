"""Reward over wall time, as bench/async.py compares it: what a run's rows say, and when one run was as good as another.

The reward of a version is the mean over all training episodes that began under it, whether they trained or not: of
those that trained, an asynchronous run would have the quick ones first. Pure but for the reads of a database.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlmodel import col, func, select

from storage.database import session
from storage.tables import Batch, Episode, Group, PolicyVersion
from workflows.contracts import VALID, EpisodeKind

SPAN = 3
"""Versions that a smoothed reward is the mean of: one has some sixty episodes."""


@dataclass(frozen=True)
class Point:
    """`seconds` since version 0 was published until `version` was; `reward`: mean of the episodes begun under it."""

    version: int
    seconds: float
    reward: float
    episodes: int


def curve_of(database: Engine, run: str, *, lag: int = 0) -> list[Point]:
    """By version. Left out are those under which no episode began, and the last ones of a run whose groups may lag by
    `lag`: what is in flight when such a run ends is cancelled, and only the quick episodes are among the ended ones."""
    with session(database) as opened:
        made = {
            row.version: row.created_at
            for row in opened.exec(select(PolicyVersion).where(PolicyVersion.run == run)).all()
        }
        rows = opened.exec(
            select(Episode.min_version, Episode.reward).where(
                Episode.run == run,
                Episode.kind == EpisodeKind.TRAIN,
                col(Episode.outcome).in_(VALID),
                col(Episode.reward).is_not(None),
            )
        ).all()
    rewards: dict[int, list[float]] = defaultdict(list)
    for version, reward in rows:
        if version is not None and reward is not None:
            rewards[version].append(reward)
    return [
        Point(version, made[version] - made[0], statistics.fmean(rewards[version]), len(rewards[version]))
        for version in sorted(made.keys() & rewards.keys())
        if not lag or version < max(made) - lag
    ]


def smoothed(curve: Sequence[Point]) -> list[tuple[float, float]]:
    """(seconds, reward): at each version from the SPANth on, the mean over the last SPAN of them by episodes."""
    found = []
    for end in range(SPAN, len(curve) + 1):
        part = curve[end - SPAN : end]
        total = sum(point.episodes for point in part)
        found.append((part[-1].seconds, sum(point.reward * point.episodes for point in part) / total))
    return found


def seconds_to(curve: Sequence[Point], reward: float) -> float | None:
    """When the smoothed reward first reached `reward`; None where it never did."""
    return next((seconds for seconds, value in smoothed(curve) if value >= reward), None)


def best(curve: Sequence[Point]) -> float:
    """The highest smoothed reward."""
    return max((value for _, value in smoothed(curve)), default=0.0)


def metrics_of(database: Engine, run: str) -> dict[str, float]:
    """Means over the run's batches of what says how stale and how well aligned they were, and seconds per step."""
    with session(database) as opened:
        batches = opened.exec(select(Batch).where(Batch.run == run, col(Batch.trained_at).is_not(None))).all()
        stale = opened.exec(
            select(func.count())
            .select_from(Group)
            .where(Group.run == run, col(Group.reason).in_(("too_stale", "beyond_divergence")))
        ).one()
    names = {
        "lag": "off_policy/steps",
        "divergence": "off_policy/divergence",
        "mismatch_kl": "mismatch_kl/mean",
    }
    found = {
        short: statistics.fmean(values)
        for short, name in names.items()
        if (values := [float(batch.metrics[name]) for batch in batches if batch.metrics.get(name) is not None])
    }
    found["dropped"] = float(stale)
    trained = sorted(batch.trained_at for batch in batches if batch.trained_at is not None)
    if len(trained) > 1:
        found["seconds_per_step"] = (trained[-1] - trained[0]) / (len(trained) - 1)
    return found
