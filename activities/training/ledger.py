"""The rows of an update: reading a batch, taking its fence, committing it once. Short transactions.

Called by `update`, in the trainer's thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Engine
from sqlmodel import Session, col, select, update

from storage.archive import uses_in
from storage.database import session
from storage.groups import trainable
from storage.tables import VOID, Batch, BatchMember, Episode, Group, Run, Turn
from workflows.contracts import VALID
from workflows.errors import FencedError, TrainerError

RESERVED, TRAINED, PUBLISHED = "reserved", "trained", "published"


@dataclass(frozen=True)
class Member:
    """An episode of the batch: its reward and the object-store keys of its segments, oldest first."""

    attempt_id: str
    group_id: str
    reward: float
    segments: list[str]
    replayed: bool = False
    """An archived success, which trained before: `attempt_id` then names this use of it."""


def batch_row(database: Engine, batch_id: str) -> Batch:
    """Raises TrainerError (final) where nobody has reserved the batch."""
    with session(database) as opened:
        row = opened.get(Batch, batch_id)
    if row is None:
        raise TrainerError(f"batch {batch_id} has not been reserved", retryable=False)
    return row


def take_fence(database: Engine, batch_id: str) -> int:
    """The number of this try of the update; every older one can't commit any more."""
    with session(database) as opened:
        opened.exec(update(Batch).where(col(Batch.id) == batch_id).values(fence=col(Batch.fence) + 1))
        return opened.exec(select(Batch.fence).where(Batch.id == batch_id)).one()


def members_of(database: Engine, batch_id: str) -> list[Member]:
    """The batch's episodes in its order. Raises TrainerError (final) for a member that is not valid or lacks tokens."""
    with session(database) as opened:
        rows = opened.exec(
            select(BatchMember, Episode)
            .where(BatchMember.batch == batch_id, BatchMember.episode == Episode.id)
            .order_by(col(BatchMember.position), col(BatchMember.episode))
        ).all()
        members = _members(opened, [(member.group_id, episode) for member, episode in rows], f"batch {batch_id}")
        uses = [(use.group_id, use.episode) for use in uses_in(opened, batch_id=batch_id)]
        members += _replayed(opened, uses, f"batch {batch_id}")
    if not members:
        raise TrainerError(f"batch {batch_id} has no members", retryable=False)
    return members


def members_of_group(database: Engine, group_id: str) -> list[Member]:
    """The episodes with which a closed group would train. Raises as `members_of`, StorageError for no such group."""
    with session(database) as opened:
        attempts = trainable(opened, group_id=group_id).members
        rows = opened.exec(select(Episode).where(col(Episode.id).in_(attempts)).order_by(col(Episode.id))).all()
        members = _members(opened, [(group_id, episode) for episode in rows], group_id)
        group = opened.get(Group, group_id)
        uses = [(group_id, group.replay)] if group is not None and group.replay else []
        return members + _replayed(opened, uses, group_id)


def _replayed(opened: Session, uses: list[tuple[str, str]], owner: str) -> list[Member]:
    """Archived successes as members of the groups that they joined. Raises as `members_of`."""
    episodes = opened.exec(select(Episode).where(col(Episode.id).in_([attempt for _, attempt in uses]))).all()
    by_id = {episode.id: episode for episode in episodes}
    found = _members(opened, [(group_id, by_id[attempt]) for group_id, attempt in uses], owner)
    return [replace(item, attempt_id=_use(item.attempt_id, item.group_id), replayed=True) for item in found]


def _use(attempt_id: str, group_id: str) -> str:
    """Name of an archived success within the group that it joined: it may be in a batch more than once."""
    return f"{attempt_id}@{group_id}"


def _members(opened: Session, rows: list[tuple[str, Episode]], owner: str) -> list[Member]:
    turns = opened.exec(
        select(Turn.episode, Turn.segment)
        .where(col(Turn.episode).in_([episode.id for _, episode in rows]), col(Turn.segment).is_not(None))
        .order_by(col(Turn.episode), col(Turn.turn))
    ).all()
    segments: dict[str, list[str]] = {}
    for attempt_id, key in turns:
        segments.setdefault(attempt_id, []).append(str(key))
    members = []
    for group_id, episode in rows:
        if episode.reward is None or episode.outcome not in VALID or episode.id not in segments:
            raise TrainerError(
                f"{episode.id} ({episode.outcome}) is in {owner} without a valid reward or without tokens",
                retryable=False,
            )
        members.append(Member(episode.id, group_id, episode.reward, segments[episode.id]))
    return members


def short_share(database: Engine, batch_id: str) -> float:
    """Share of the batch's groups that closed with fewer valid siblings than `group_size`."""
    groups = select(BatchMember.group_id).where(BatchMember.batch == batch_id).distinct()
    with session(database) as opened:
        total = len(opened.exec(groups).all())
        short = opened.exec(select(Group.id).where(col(Group.id).in_(groups), col(Group.short))).all()
    return len(short) / total if total else 0.0


def checkpoint_before(database: Engine, run: str, step: int, first: str) -> str:
    """Manifest key of the state that update `step` begins with: the previous batch's, `first` for step 1."""
    if step == 1:
        return first
    with session(database) as opened:
        previous = opened.exec(
            select(Batch).where(Batch.run == run, Batch.step == step - 1, Batch.state != VOID)
        ).first()
    if previous is None or not previous.checkpoint:
        raise TrainerError(f"{run}: step {step} can't begin, step {step - 1} is not trained", retryable=False)
    return previous.checkpoint


def running_state(database: Engine) -> tuple[str, dict[str, Any], str] | None:
    """(run, its configuration, manifest key of the state that its next update begins with) of the run that began last
    of those that have not ended; the key is empty before its first update. None where all have ended."""
    with session(database) as opened:
        run = opened.exec(
            select(Run).where(col(Run.ended_at).is_(None)).order_by(col(Run.started_at).desc()).limit(1)
        ).first()
        if run is None:
            return None
        newest = opened.exec(
            select(Batch.checkpoint)
            .where(Batch.run == run.id, Batch.state != VOID, Batch.checkpoint != "")
            .order_by(col(Batch.step).desc())
            .limit(1)
        ).first()
        return run.id, run.config, newest or ""


def require_fence(database: Engine, batch_id: str, fence: int) -> None:
    """Raises FencedError when a newer try has begun or the batch is trained already."""
    row = batch_row(database, batch_id)
    if row.fence != fence or row.state != RESERVED:
        raise _fenced(batch_id, fence, row)


def commit(
    database: Engine,
    batch_id: str,
    *,
    fence: int,
    checkpoint: str,
    metrics: dict[str, float],
    advantages: dict[str, float],
) -> None:
    """Make the update durable, once. Raises FencedError when a newer try has begun."""
    values = {"state": TRAINED, "checkpoint": checkpoint, "metrics": metrics, "trained_at": time.time()}
    _close(database, batch_id, fence, values, advantages)


def commit_void(database: Engine, batch_id: str, *, fence: int, reason: str, metrics: dict[str, float]) -> None:
    """Close a batch that taught nothing, once: its episodes stay its own. Raises FencedError as `commit` does."""
    _close(database, batch_id, fence, {"state": VOID, "reason": reason, "metrics": metrics}, {})


def _close(
    database: Engine, batch_id: str, fence: int, values: dict[str, object], advantages: dict[str, float]
) -> None:
    with session(database) as opened:
        done = opened.exec(
            update(Batch)
            .where(col(Batch.id) == batch_id, col(Batch.fence) == fence, col(Batch.state) == RESERVED)
            .values(**values)
        )
        if done.rowcount:
            for attempt_id, advantage in advantages.items():
                opened.exec(
                    update(BatchMember).where(col(BatchMember.episode) == attempt_id).values(advantage=advantage)
                )
            for use in uses_in(opened, batch_id=batch_id):
                use.advantage = advantages.get(_use(use.episode, use.group_id))
                opened.add(use)
    if not done.rowcount:
        raise _fenced(batch_id, fence, batch_row(database, batch_id))


def _fenced(batch_id: str, fence: int, row: Batch) -> FencedError:
    # Retryable: the server ignores what an outdated attempt says, and the valid one then reads the committed result.
    return FencedError(f"{batch_id}: try {fence} is outdated, now {row.fence} ({row.state})", retryable=True)
