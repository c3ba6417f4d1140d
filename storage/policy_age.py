"""How old the weights were that an engine answered with: versions that were published when it was asked, minus the
version that made the first token of its answer. And the answers whose weights changed in the middle of them.

It is what off-policy training pays for the publication and the routing alone, before a token is made or waits. Computed
from the rows of turns and publications, whose times are those of the hosts that wrote them. Called by the report and by
the export of curves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import accumulate
from typing import NamedTuple

import sqlalchemy
from sqlmodel import Session, col, select

from storage.tables import Batch, BatchMember, Episode, Publication, Turn
from workflows.contracts import EpisodeKind

METRIC = "weight_sync/policy_age"


class PolicyAge(NamedTuple):
    """Over requests of training episodes that an engine answered."""

    requests: dict[int, int]
    """By versions behind, the fewest first."""
    by_step: dict[int, tuple[float, int]]
    """(mean, most) of the requests whose tokens a step trained on."""

    def metrics(self, step: int) -> dict[str, float]:
        """`weight_sync/policy_age` and `_max` of the requests that a step trained on; empty where nobody knows."""
        if step not in self.by_step:
            return {}
        mean, most = self.by_step[step]
        return {METRIC: mean, f"{METRIC}_max": float(most)}

    @property
    def mean(self) -> float | None:
        count = sum(self.requests.values())
        return sum(age * many for age, many in self.requests.items()) / count if count else None

    @property
    def most(self) -> int | None:
        return max(self.requests, default=None)


def policy_age(opened: Session, *, run: str) -> PolicyAge:
    """Turns from before the moment was kept are left out."""
    published = opened.exec(
        select(Publication.published_at, Publication.version)
        .where(Publication.run == run)
        .order_by(col(Publication.published_at))
    ).all()
    times, newest = [at for at, _ in published], list(accumulate((version for _, version in published), max))
    requests: Counter[int] = Counter()
    by_step: dict[int, list[int]] = defaultdict(list)
    for asked_at, version, step in _requests(opened, run):
        count = bisect_right(times, asked_at)
        age = max(0, newest[count - 1] - version) if count else 0
        requests[age] += 1
        if step is not None:
            by_step[step].append(age)
    steps = {step: (sum(ages) / len(ages), max(ages)) for step, ages in by_step.items()}
    return PolicyAge(dict(sorted(requests.items())), steps)


def _requests(opened: Session, run: str) -> list[tuple[float, int, int | None]]:
    """(when an engine was asked, version of the first token, step that trained on it) of each answered request."""
    statement = (
        sqlalchemy.select(Turn.asked_at, Turn.min_version, Batch.step)  # type: ignore[call-overload]
        .join(Episode, col(Turn.episode) == col(Episode.id))
        .outerjoin(BatchMember, col(BatchMember.episode) == col(Episode.id))
        .outerjoin(Batch, col(BatchMember.batch) == col(Batch.id))
        .where(Episode.run == run, Episode.kind == EpisodeKind.TRAIN, col(Turn.asked_at) > 0)
    )
    return [(asked_at, version, step) for asked_at, version, step in opened.connection().execute(statement)]


class Spanning(NamedTuple):
    """Requests that were in flight while an engine took up `version`: their answers begin with tokens of older weights
    and end with its own. `tokens`: all that they sampled."""

    version: int
    requests: int
    tokens: int


def spanning(opened: Session, *, run: str) -> list[Spanning]:
    """By version, of training episodes; only versions that a request spanned."""
    requests, tokens = sqlalchemy.func.count(), sqlalchemy.func.sum(Turn.sampled_tokens)
    statement = (
        sqlalchemy.select(Turn.max_version, requests, tokens)  # type: ignore[call-overload]
        .join(Episode, col(Turn.episode) == col(Episode.id))
        .where(
            Episode.run == run,
            Episode.kind == EpisodeKind.TRAIN,
            col(Turn.max_version) > col(Turn.min_version),
        )
        .group_by(col(Turn.max_version))
        .order_by(col(Turn.max_version))
    )
    return [Spanning(*row) for row in opened.connection().execute(statement)]
