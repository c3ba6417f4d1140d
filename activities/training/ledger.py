"""The rows of an update: reading a batch, taking its fence, committing it once. Short transactions.

Called by `update`, in the trainer's thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlmodel import col, select, update

from storage.database import session
from storage.tables import Batch, BatchMember, Episode, Turn
from workflows.errors import FencedError, TrainerError

RESERVED, TRAINED, PUBLISHED = "reserved", "trained", "published"


@dataclass(frozen=True)
class Member:
    """An episode of the batch: its reward and the object-store keys of its segments, oldest first."""

    attempt_id: str
    group_id: str
    reward: float
    segments: list[str]


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
    """The batch's episodes in its order. Raises TrainerError (final) for a member without reward or tokens."""
    with session(database) as opened:
        rows = opened.exec(
            select(BatchMember, Episode)
            .where(BatchMember.batch == batch_id, BatchMember.episode == Episode.id)
            .order_by(col(BatchMember.position), col(BatchMember.episode))
        ).all()
        turns = opened.exec(
            select(Turn.episode, Turn.segment)
            .where(col(Turn.episode).in_([episode.id for _, episode in rows]), col(Turn.segment).is_not(None))
            .order_by(col(Turn.episode), col(Turn.turn))
        ).all()
    segments: dict[str, list[str]] = {}
    for attempt_id, key in turns:
        segments.setdefault(attempt_id, []).append(str(key))
    members = []
    for member, episode in rows:
        if episode.reward is None or episode.id not in segments:
            raise TrainerError(
                f"{episode.id} is in batch {batch_id} without a reward or without tokens", retryable=False
            )
        members.append(Member(episode.id, member.group_id, episode.reward, segments[episode.id]))
    if not members:
        raise TrainerError(f"batch {batch_id} has no members", retryable=False)
    return members


def checkpoint_before(database: Engine, run: str, step: int, first: str) -> str:
    """Manifest key of the state that update `step` begins with: the previous batch's, `first` for step 1."""
    if step == 1:
        return first
    with session(database) as opened:
        previous = opened.exec(select(Batch).where(Batch.run == run, Batch.step == step - 1)).first()
    if previous is None or not previous.checkpoint:
        raise TrainerError(f"{run}: step {step} can't begin, step {step - 1} is not trained", retryable=False)
    return previous.checkpoint


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
    with session(database) as opened:
        done = opened.exec(
            update(Batch)
            .where(col(Batch.id) == batch_id, col(Batch.fence) == fence, col(Batch.state) == RESERVED)
            .values(state=TRAINED, checkpoint=checkpoint, metrics=metrics, trained_at=time.time())
        )
        if done.rowcount:
            for attempt_id, advantage in advantages.items():
                opened.exec(
                    update(BatchMember).where(col(BatchMember.episode) == attempt_id).values(advantage=advantage)
                )
    if not done.rowcount:
        raise _fenced(batch_id, fence, batch_row(database, batch_id))


def _fenced(batch_id: str, fence: int, row: Batch) -> FencedError:
    # Retryable: the server ignores what an outdated attempt says, and the valid one then reads the committed result.
    return FencedError(f"{batch_id}: try {fence} is outdated, now {row.fence} ({row.state})", retryable=True)
