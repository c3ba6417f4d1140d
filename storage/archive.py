"""The archive of rare successes: valid successes of tasks that the policy seldom solves. One may join a later group of
the same task that has none, so that it has something to learn from. What is in quarantine is no part of it.

Keyword-only functions over one open session. Nothing is copied: the archive is the run's own episodes, and each use of
one is a row of Replay. Called when a group is recorded and when a batch is reserved.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import case, func, not_
from sqlmodel import Session, col, select

from storage.quarantine import in_quarantine
from storage.tables import Batch, Episode, Group, Replay, Run
from workflows.contracts import VALID, EpisodeKind, GroupResult, Outcome


def replay_for(opened: Session, *, run: str, result: GroupResult) -> str:
    """The attempt that joins a closed group; empty where none does. The same call again gives the same attempt.

    A group is joined where all siblings were equally wrong and the run's pass rate on the task is at most
    `training.replay_pass_rate`; by the newest success, whose policy is the nearest to today's."""
    recorded = opened.get(Group, result.group_id)
    if recorded is not None:
        return recorded.replay
    row = opened.get(Run, run)
    training = row.config.get("training", {}) if row is not None else {}
    if not training.get("replay_share") or result.eligible or result.reason != "no_signal":
        return ""
    member = opened.get(Episode, result.members[0])
    if member is None:
        return ""
    of_task = (
        (col(Episode.run) == run)
        & (col(Episode.task) == member.task)
        & (col(Episode.kind) == EpisodeKind.TRAIN)
        & col(Episode.outcome).in_(VALID)
        & col(Episode.reward).is_not(None)
        & not_(in_quarantine())
    )
    passed = col(Episode.outcome) == Outcome.MODEL_SUCCESS
    tried, succeeded = opened.exec(
        select(func.count(), func.sum(case((passed, 1), else_=0))).select_from(Episode).where(of_task)
    ).one()
    if not succeeded or succeeded > training["replay_pass_rate"] * tried:
        return ""
    newest = (
        select(Episode.id)
        .where(of_task, passed, col(Episode.tampered).is_(False), col(Episode.reward) > max(result.rewards))
        # Not by when it ended: a synchronous run does not depend on that.
        .order_by(col(Episode.max_version).desc(), col(Episode.id))
    )
    return opened.exec(newest).first() or ""


def use(opened: Session, *, batch_id: str, group_ids: Sequence[str]) -> int:
    """Note the archived successes that train with these groups in a batch; how many. May be repeated. None that is in
    quarantine does."""
    joined = select(Group).join(Episode, col(Group.replay) == Episode.id).where(not_(in_quarantine()))
    groups = opened.exec(joined.where(col(Group.id).in_(group_ids))).all()
    for group in groups:
        if opened.get(Replay, (batch_id, group.id)) is None:
            opened.add(Replay(batch=batch_id, group_id=group.id, episode=group.replay))
    return len(groups)


def uses_of(opened: Session, *, attempt: str) -> list[tuple[Replay, str]]:
    """The uses of an attempt, each with its batch's state: a void one trained nothing."""
    uses = select(Replay, Batch.state).join(Batch, col(Replay.batch) == Batch.id).where(Replay.episode == attempt)
    return [(use, state) for use, state in opened.exec(uses.order_by(col(Batch.step), Replay.batch)).all()]


def uses_in(opened: Session, *, batch_id: str) -> list[Replay]:
    return list(opened.exec(select(Replay).where(Replay.batch == batch_id).order_by(Replay.group_id)).all())
