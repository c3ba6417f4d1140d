"""Finish-order bias: what a batch trains on, against what was admitted beside it.

A pool that takes what is complete first takes what is short first. Per batch and over valid training episodes this
compares sampled tokens and reward of the consumed ones (the batch's members) with those of

- all admitted groups of the same window: every group whose number lies between the smallest and the largest of the
  batch, whatever became of it. Groups without a signal and dropped ones are among them, so rewards differ also where
  the order of finishing plays no part; under `in_order` that is all the difference there is;
- all siblings of the batch's own groups that came to an end, taken or not, where `group_redundancy` made spare ones.

Attempts that were cut off as surplus have no length and no reward: they are in no mean. They are the long ones, so with
`oversample` and `group_redundancy` the bias is larger than what is shown. A window is complete once its
groups have closed, which may be batches later, so the figures are written into the batch's metrics (`finish_order/*`)
with each later reservation and at the run's end, until none of the window's groups is `open`. Groups that an operator
ended leave no row and stay open.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, func
from sqlmodel import Session, col, select

from storage.tables import VOID, Batch, BatchMember, Episode, Group
from workflows.contracts import VALID, EpisodeKind

PREFIX = "finish_order/"
MEASURES = ("tokens", "reward")
COMPARED = ("consumed", "admitted", "siblings")
REVISITED = 8
"""Latest batches whose windows are looked at again."""


def settle(opened: Session, *, run: str) -> None:
    """Write the figures of the run's latest trained batches, as far as their windows are known."""
    rows = opened.exec(
        select(Batch)
        .where(Batch.run == run, Batch.state != VOID, col(Batch.trained_at).is_not(None))
        .order_by(col(Batch.step).desc())
        .limit(REVISITED)
    ).all()
    for row in rows:
        if row.metrics.get(f"{PREFIX}open") != 0 and (figures := of_batch(opened, run=run, batch_id=row.id)):
            row.metrics = row.metrics | {f"{PREFIX}{name}": value for name, value in figures.items()}
            opened.add(row)


def of_batch(opened: Session, *, run: str, batch_id: str) -> dict[str, float]:
    """`{tokens,reward}_{consumed,admitted,siblings}`: means over valid episodes; `open`: groups of the window that have
    not closed. Empty for a batch without members."""
    ids = opened.exec(select(BatchMember.group_id).where(BatchMember.batch == batch_id).distinct()).all()
    low, high = opened.exec(select(func.min(Group.number), func.max(Group.number)).where(col(Group.id).in_(ids))).one()
    if low is None or high is None:
        return {}
    window = (Group.run == run, col(Group.number).between(low, high))
    closed = opened.exec(select(func.count()).select_from(Group).where(*window)).one()
    members = select(BatchMember.episode).where(BatchMember.batch == batch_id)
    return {
        **_means(opened, "consumed", col(Episode.id).in_(members)),
        **_means(opened, "admitted", col(Episode.group_id).in_(select(Group.id).where(*window))),
        **_means(opened, "siblings", col(Episode.group_id).in_(ids)),
        "open": float(high - low + 1 - closed),
    }


def _means(opened: Session, of: str, which: ColumnElement[bool]) -> dict[str, float]:
    tokens, reward = opened.exec(
        select(func.avg(Episode.sampled_tokens), func.avg(Episode.reward)).where(
            which, Episode.kind == EpisodeKind.TRAIN, col(Episode.outcome).in_(VALID)
        )
    ).one()
    return {f"tokens_{of}": float(tokens or 0.0), f"reward_{of}": float(reward or 0.0)}
