"""What trained on rewards that were wrong: batches, steps, versions, every later version, and their share of the run.

Reads only, keyword-only, over one open session. Which attempts are asked about is a condition on rows of Episode:
`quarantine.in_quarantine()` for all that is marked, `quarantine.covered_by(target)` for one mark. An attempt counts as
trained where it is in a batch that was trained, whatever weight the update gave it; a batch whose cut came before the
mark keeps what it was cut with, so that it is made again to the bit. Called by `ratchet quarantine` and the report.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import sqlalchemy
from sqlalchemy import ColumnElement, case, distinct, func
from sqlmodel import Session, col, select

from storage.tables import VOID, Batch, BatchMember, Episode, Group, PolicyVersion, Replay, Run
from workflows.contracts import VALID, EpisodeKind

DONE = ("trained", "published")
"""States of a batch whose step is made."""


class TouchedBatch(NamedTuple):
    """A batch with attempts in question, archived successes among them. Tokens are sampled ones."""

    batch: str
    step: int
    state: str
    episodes: int
    of_episodes: int
    tokens: int
    of_tokens: int
    version: int | None
    """That it made, once published."""


class Descendants(NamedTuple):
    """The versions of a run whose weights go back to a touched batch."""

    run: str
    versions: list[int]


class Affected(NamedTuple):
    """Shares are `x` of `of_x`. Episodes are valid attempts of training."""

    run: str
    episodes: int
    of_episodes: int
    trained: int
    of_trained: int
    """Attempts in batches whose step is made; an archived success counts each time."""
    tokens: int
    of_tokens: int
    """Sampled tokens of those."""
    batches: list[TouchedBatch]
    of_batches: int
    """Of the run, those whose step is made."""
    waiting: int
    """Valid attempts of training that no batch has taken; none takes them any more."""
    evaluations: list[int]
    """Versions whose evaluation counted one."""
    versions: list[Descendants]
    """First the run's own, then those of the runs that went on from it."""

    @property
    def touched(self) -> int:
        """Batches in question whose step is made."""
        return sum(item.state in DONE for item in self.batches)


def affected(opened: Session, *, run: str, which: ColumnElement[bool]) -> Affected:
    """What became of the attempts in question within the run."""
    batches = _touched(opened, run, which)
    made = [item for item in batches if item.state in DONE]
    episodes, of_episodes = _counted(opened, run, which)
    sums = _sums(opened, run, which, only_done=True)
    return Affected(
        run=run,
        episodes=episodes,
        of_episodes=of_episodes,
        trained=sum(item.episodes for item in made),
        of_trained=sum(of for _, of, _, _ in sums.values()),
        tokens=sum(item.tokens for item in made),
        of_tokens=sum(of for _, _, _, of in sums.values()),
        batches=batches,
        of_batches=_count_batches(opened, run),
        waiting=_waiting(opened, run, which),
        evaluations=_evaluations(opened, run, which),
        versions=_descendants(opened, run, min(item.step for item in made)) if made else [],
    )


def _counted(opened: Session, run: str, which: ColumnElement[bool]) -> tuple[int, int]:
    """(in question, all) of the valid attempts of training."""
    asked = func.coalesce(func.sum(case((which, 1), else_=0)), 0)
    statement = select(asked, func.count()).select_from(Episode)
    some, of = opened.exec(statement.where(*_valid_of(run))).one()
    return int(some), int(of)


def _valid_of(run: str) -> tuple[ColumnElement[bool], ...]:
    return (
        col(Episode.run) == run,
        col(Episode.kind) == EpisodeKind.TRAIN,
        col(Episode.outcome).in_(VALID),
    )


Sums = dict[str, tuple[int, int, int, int]]
"""By batch: episodes in question, episodes, tokens in question, tokens."""


def _sums(opened: Session, run: str, which: ColumnElement[bool], *, only_done: bool) -> Sums:
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    states = col(Batch.state).in_(DONE) if only_done else col(Batch.state) != VOID
    tables: tuple[type[BatchMember] | type[Replay], ...] = (BatchMember, Replay)
    for table in tables:
        # SQLAlchemy's own select: SQLModel types at most four columns.
        statement = (
            sqlalchemy.select(
                col(table.batch),
                func.sum(case((which, 1), else_=0)),
                func.count(),
                func.sum(case((which, col(Episode.sampled_tokens)), else_=0)),
                func.sum(col(Episode.sampled_tokens)),
            )
            .select_from(table)
            .join(Batch, col(table.batch) == col(Batch.id))
            .join(Episode, col(table.episode) == col(Episode.id))
            .where(col(Batch.run) == run, states)
            .group_by(col(table.batch))
        )
        for batch, *sums in opened.connection().execute(statement).all():
            found[batch] = [one + int(other or 0) for one, other in zip(found[batch], sums, strict=True)]
    return {batch: (sums[0], sums[1], sums[2], sums[3]) for batch, sums in found.items()}


def _touched(opened: Session, run: str, which: ColumnElement[bool]) -> list[TouchedBatch]:
    sums = {batch: item for batch, item in _sums(opened, run, which, only_done=False).items() if item[0]}
    rows = {row.id: row for row in opened.exec(select(Batch).where(Batch.run == run)).all() if row.id in sums}
    made = select(PolicyVersion.batch, PolicyVersion.version).where(PolicyVersion.run == run)
    versions = {batch: version for batch, version in opened.exec(made).all()}
    found = [
        TouchedBatch(
            batch=batch,
            step=rows[batch].step,
            state=rows[batch].state,
            episodes=item[0],
            of_episodes=item[1],
            tokens=item[2],
            of_tokens=item[3],
            version=versions.get(batch),
        )
        for batch, item in sums.items()
    ]
    return sorted(found, key=lambda item: (item.step, item.batch))


def _count_batches(opened: Session, run: str) -> int:
    return opened.exec(
        select(func.count()).select_from(Batch).where(Batch.run == run, col(Batch.state).in_(DONE))
    ).one()


def _waiting(opened: Session, run: str, which: ColumnElement[bool]) -> int:
    taken = select(BatchMember.episode)
    could = select(Group.id).where(Group.run == run, col(Group.eligible).is_(True))
    statement = select(func.count(distinct(col(Episode.id)))).where(
        *_valid_of(run), which, col(Episode.group_id).in_(could), col(Episode.id).not_in(taken)
    )
    return opened.exec(statement).one()


def _evaluations(opened: Session, run: str, which: ColumnElement[bool]) -> list[int]:
    statement = select(Episode.group_id).where(
        Episode.run == run, Episode.kind == EpisodeKind.EVALUATION, col(Episode.outcome).in_(VALID), which
    )
    names = {group_id.rpartition("/eval-v")[2] for group_id in opened.exec(statement.distinct()).all()}
    return sorted(int(name) for name in names if name.isdecimal())


def _descendants(opened: Session, run: str, step: int) -> list[Descendants]:
    """The run's versions from a step on; and all of the runs that began with its last state, and so on."""
    own = select(PolicyVersion.version).where(PolicyVersion.run == run, PolicyVersion.step >= step)
    found, next_runs, seen = [Descendants(run, sorted(opened.exec(own).all()))], [run], {run}
    while next_runs:
        resumed = select(Run.id).where(col(Run.resume_from).in_(next_runs)).order_by(col(Run.started_at), Run.id)
        next_runs = [name for name in opened.exec(resumed).all() if name not in seen]
        seen.update(next_runs)
        for name in next_runs:
            every = select(PolicyVersion.version).where(PolicyVersion.run == name)
            found.append(Descendants(name, sorted(opened.exec(every).all())))
    return found
