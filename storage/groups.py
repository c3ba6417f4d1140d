"""What became of a run's groups: how many closed, trained or trained nothing, what was surplus, and the tasks in
quarantine.

Reads only, keyword-only, over one open session. Called by the report, the update and the reservation of a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, case, distinct, func, literal_column
from sqlmodel import Session, col, select

from storage.quarantine import in_quarantine
from storage.queries import members_of, run_row
from storage.series import batches, void_batches
from storage.tables import BatchMember, Episode, Group, Quarantine
from workflows.config import RunConfig
from workflows.contracts import VALID, EpisodeKind, Outcome, ShortGroup
from workflows.errors import StorageError

LEFT_OUT = {"beyond_divergence": "off_policy/dropped_groups", "no_signal": "groups/no_signal"}
"""Reason, and the metric of the update that counts the groups it was for."""


def left_out(metrics: dict[str, Any]) -> dict[str, int]:
    """Groups of a batch that trained nothing, by reason."""
    return {reason: count for reason, name in LEFT_OUT.items() if (count := int(metrics.get(name) or 0))}


class Trainable(NamedTuple):
    """A group and its attempts that may train, in sibling order."""

    group_id: str
    members: list[str]


def trainable(opened: Session, *, group_id: str) -> Trainable:
    """The valid training attempts of a closed group, but for those that ended valid after it had closed. Raises
    StorageError (final) where the rows know no such group."""
    group = opened.get(Group, group_id)
    if group is None:
        raise StorageError(f"{group_id} has no row", retryable=False)
    ids = opened.exec(
        select(Episode.id).where(
            Episode.group_id == group_id,
            Episode.kind == EpisodeKind.TRAIN,
            col(Episode.outcome).in_(VALID),
            col(Episode.reward).is_not(None),
        )
    ).all()
    taken = [attempt for attempt in ids if group.members is None or attempt in group.members]
    return Trainable(group_id, sorted(taken, key=_sibling))


def sound(opened: Session, *, run: str, groups: Sequence[Trainable]) -> list[Trainable]:
    """The groups without what is in quarantine. One that lost by that what it needs to train is left out: as many
    members as the run asks of a group, and two different rewards, of which one may be an archived success's."""
    rows = opened.exec(select(Group).where(col(Group.id).in_([group.group_id for group in groups]))).all()
    joined = {row.id: row.replay for row in rows if row.replay}
    ids = [*(attempt for group in groups for attempt in group.members), *joined.values()]
    marked = set(opened.exec(select(Episode.id).where(col(Episode.id).in_(ids), in_quarantine())).all())
    if not marked:
        return list(groups)
    rewards = dict(opened.exec(select(Episode.id, Episode.reward).where(col(Episode.id).in_(ids))).all())
    rollout = RunConfig.model_validate(run_row(opened, run=run).config).rollout
    fewest = 2 if rollout.short_group is ShortGroup.TRAIN else rollout.group_size
    kept = []
    for group in groups:
        members = [attempt for attempt in group.members if attempt not in marked]
        replay = joined.get(group.group_id, "")
        scored = members + ([replay] if replay and replay not in marked else [])
        whole = len(scored) == len(group.members) + bool(replay)
        if whole or (len(members) >= fewest and len({rewards[attempt] for attempt in scored}) > 1):
            kept.append(Trainable(group.group_id, members))
    return kept


def barred(opened: Session, *, run: str) -> list[int]:
    """Numbers of the closed groups that could train but for what is in quarantine, and that no batch has taken."""
    marked = select(Episode.id).where(Episode.run == run, in_quarantine())
    touched = select(Episode.group_id).where(Episode.run == run, in_quarantine())
    rows = opened.exec(
        select(Group)
        .where(Group.run == run, col(Group.eligible).is_(True))
        .where(col(Group.id).not_in(select(BatchMember.group_id)))
        .where(col(Group.id).in_(touched) | col(Group.replay).in_(marked))
        .order_by(col(Group.number))
    ).all()
    kept = {
        group.group_id for group in sound(opened, run=run, groups=[trainable(opened, group_id=row.id) for row in rows])
    }
    return [row.number for row in rows if row.id not in kept]


def reserved(opened: Session, *, batch_id: str) -> list[Trainable]:
    """The groups of a batch that was cut, as it was cut."""
    found: dict[str, list[str]] = {}
    for member in members_of(opened, batch_id=batch_id):
        found.setdefault(member.group_id, []).append(member.episode)
    return [Trainable(group_id, members) for group_id, members in found.items()]


def _sibling(attempt_id: str) -> int:
    """`k` of `<group>/e<k>/a<m>`."""
    return int(attempt_id.split("/")[-2].removeprefix("e"))


def batch_reward(opened: Session, *, batch_id: str) -> float:
    """Mean reward of a batch's episodes."""
    statement = select(func.avg(Episode.reward)).join(BatchMember, col(BatchMember.episode) == Episode.id)
    return float(opened.exec(statement.where(BatchMember.batch == batch_id)).one() or 0.0)


def groups(opened: Session, *, run: str) -> dict[str, int]:
    """Closed groups: `closed`, `eligible`, `short`, `trained`, and attempts `replaced` within them."""
    closed, eligible, short, replaced = opened.exec(
        select(
            func.count(),
            func.coalesce(func.sum(case((col(Group.eligible), 1), else_=0)), 0),
            func.coalesce(func.sum(case((col(Group.short), 1), else_=0)), 0),
            func.coalesce(func.sum(Group.replaced), 0),
        ).where(Group.run == run)
    ).one()
    trained = _batched(opened, run) - sum(_left_out_of_batches(opened, run).values())
    return {"closed": closed, "eligible": eligible, "short": short, "trained": trained, "replaced": replaced}


def _batched(opened: Session, run: str) -> int:
    """Groups that were in a batch."""
    return opened.exec(
        select(func.count(distinct(col(BatchMember.group_id))))
        .join(Group, col(BatchMember.group_id) == Group.id)
        .where(Group.run == run)
    ).one()


def _left_out_of_batches(opened: Session, run: str) -> Counter[str]:
    """Groups that were in a batch and trained nothing, by reason."""
    counts: Counter[str] = Counter()
    for batch in batches(opened, run=run) + void_batches(opened, run=run):
        counts.update(left_out(batch.metrics))
    return counts


def groups_dropped(opened: Session, *, run: str) -> dict[str, int]:
    """Closed groups that did not train, by reason. `left_over`: eligible, but too stale or not needed any more."""
    rows = opened.exec(
        select(Group.reason, func.count())
        .where(Group.run == run, col(Group.eligible).is_(False))
        .group_by(Group.reason)
        .order_by(Group.reason)
    ).all()
    counts: Counter[str] = Counter()
    for reason, count in rows:
        counts[reason.partition(":")[0] or "unnamed"] += count
    counts += _left_out_of_batches(opened, run)
    left = groups(opened, run=run)["eligible"] - _batched(opened, run)
    return dict(counts) | ({"left_over": left} if left else {})


class Fate(NamedTuple):
    """Closed groups with one fate, and the mean sampled tokens of their valid episodes."""

    fate: str
    groups: int
    sampled_tokens: float | None


def fates(opened: Session, *, run: str) -> list[Fate]:
    """What became of the run's closed groups, by the length of their episodes: whether the long ones train too.

    `trained` were in a batch; the other fates are those of `groups_dropped`."""
    batched = col(Group.id).in_(select(BatchMember.group_id))
    # Literals, not parameters: PostgreSQL would not see that what is grouped by is what is selected.
    trained: ColumnElement[str] = literal_column("'trained'")
    left_over: ColumnElement[str] = literal_column("'left_over'")
    fate = case((batched, trained), (col(Group.eligible), left_over), else_=col(Group.reason))
    valid = (col(Episode.group_id) == Group.id) & col(Episode.outcome).in_(VALID)
    rows = opened.exec(
        select(fate, func.count(distinct(col(Group.id))), func.avg(Episode.sampled_tokens))
        .select_from(Group)
        .join(Episode, valid, isouter=True)
        .where(Group.run == run)
        .group_by(fate)
        .order_by(fate)
    ).all()
    return [Fate(name or "unnamed", count, None if tokens is None else float(tokens)) for name, count, tokens in rows]


class Surplus(NamedTuple):
    """Attempts that were ended as surplus, and those of surplus groups: what they sampled, how long they ran."""

    groups: int
    attempts: int
    sampled_tokens: int
    seconds: float


def surplus(opened: Session, *, run: str) -> Surplus:
    unwanted = select(Group.id).where(Group.run == run, Group.reason == "surplus")
    attempts, tokens, seconds = opened.exec(
        select(func.count(), func.sum(Episode.sampled_tokens), func.sum(Episode.ended_at - Episode.started_at)).where(
            Episode.run == run,
            Episode.kind == EpisodeKind.TRAIN,
            (col(Episode.outcome) == Outcome.SURPLUS) | col(Episode.group_id).in_(unwanted),
        )
    ).one()
    count = len(opened.exec(unwanted).all())
    return Surplus(count, attempts, int(tokens or 0), float(seconds or 0.0))


def quarantined(opened: Session, *, run: str) -> list[Quarantine]:
    statement = select(Quarantine).where(Quarantine.run == run).order_by(col(Quarantine.since), col(Quarantine.task))
    return list(opened.exec(statement).all())
