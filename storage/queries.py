"""Reads and writes of the lineage: small keyword-only functions over one open session.

Writes are idempotent upserts on natural keys; the same call again changes nothing. Called by the lineage activities,
the command line and the report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from sqlalchemy import ColumnElement, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import Session, SQLModel, col, select

from storage.database import one_at_a_time
from storage.tables import (
    VOID,
    Batch,
    BatchMember,
    EngineLease,
    Episode,
    Evaluation,
    Group,
    PolicyVersion,
    Quarantine,
    Replay,
    Run,
    ServedEvaluation,
    Task,
    Turn,
)
from workflows.contracts import (
    VALID,
    BatchWait,
    EpisodeKind,
    EpisodeRecord,
    EvaluationResult,
    EvaluationState,
    FailureType,
    GroupResult,
    RunState,
    TaskRef,
)
from workflows.errors import RatchetError, StorageError

ENGINES = "engines"
OVER = (RunState.FINISHED, RunState.FAILED, RunState.CANCELLED)


class AlreadyReserved(StorageError):
    """An episode is in another batch: a trajectory trains at most once. Final."""

    default_retryable = False


def upsert(opened: Session, row: SQLModel) -> None:
    """Insert the row, or replace every other column where its key exists."""
    table = row.__table__  # type: ignore[attr-defined]
    dialect: Any = postgresql if opened.get_bind().dialect.name == "postgresql" else sqlite
    values = {column.name: getattr(row, column.name) for column in table.columns}
    keys = [column.name for column in table.primary_key.columns]
    others = {name: value for name, value in values.items() if name not in keys}
    statement = dialect.insert(table).values(**values)
    opened.exec(statement.on_conflict_do_update(index_elements=keys, set_=others))


def task_key(task: TaskRef) -> str:
    return f"{task.taskset}/{task.task_id}"


def put_episode(opened: Session, *, record: EpisodeRecord) -> None:
    """The attempt's row and those of its turns. Only a valid attempt has a reward."""
    names = Episode.model_fields.keys() & EpisodeRecord.model_fields.keys()
    values = {name: getattr(record, name) for name in names - {"task", "reward"}}
    reward = record.reward if record.valid else None
    upsert(opened, Episode(id=record.attempt_id, task=task_key(record.task), reward=reward, **values))
    for turn in record.turns:
        upsert(opened, Turn(episode=record.attempt_id, **turn.model_dump()))


def put_group(opened: Session, *, run: str, result: GroupResult) -> None:
    """The closed group's row; its task is that of its episodes."""
    task = opened.exec(select(Episode.task).where(Episode.group_id == result.group_id)).first()
    rewards = result.rewards
    upsert(
        opened,
        Group(
            id=result.group_id,
            run=run,
            task=task or result.task_id,
            number=result.number,
            eligible=result.eligible,
            reason=result.reason,
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            outcomes=result.outcomes,
            members=result.members,
            replaced=result.replaced,
            short=result.short,
            replay=result.replay,
            draw=result.draw,
            started_at=result.started_at,
            closed_at=result.closed_at,
        ),
    )


def put_task(opened: Session, *, ref: TaskRef, kind: str, instruction: str, oracle_commands: int | None = None) -> None:
    """`oracle_commands`: None leaves what is known of them."""
    if oracle_commands is None:
        oracle_commands = opened.exec(select(Task.oracle_commands).where(Task.id == task_key(ref))).first()
    upsert(
        opened,
        Task(
            id=task_key(ref),
            taskset=ref.taskset,
            task_id=ref.task_id,
            split=ref.split,
            kind=kind,
            instruction=instruction,
            oracle_commands=oracle_commands,
        ),
    )


def put_quarantine(opened: Session, *, run: str, task: TaskRef, why: str, since: float) -> None:
    upsert(opened, Quarantine(run=run, task=task_key(task), why=why, since=since))


def put_evaluation(opened: Session, *, run: str, result: EvaluationResult) -> None:
    upsert(
        opened,
        Evaluation(
            run=run,
            version=result.version,
            episodes=result.episodes,
            mean_reward=result.mean_reward,
            excluded=result.excluded,
            by_kind=result.by_kind,
            ended_at=time.time(),
        ),
    )


class Grouped(Protocol):
    """A group and the attempts of it that are to train."""

    @property
    def group_id(self) -> str: ...
    @property
    def members(self) -> list[str]: ...


def hold_batches(opened: Session, *, run: str) -> None:
    """Until this transaction ends no other cuts a batch of the run, or marks what may be in one."""
    one_at_a_time(opened, f"batches of {run}")


def reserve_batch(
    opened: Session,
    *,
    batch_id: str,
    run: str,
    step: int,
    policy_version: int,
    groups: Sequence[Grouped],
    wait: BatchWait,
) -> int:
    """Reserve the groups' episodes for the batch; how many. The same call again gives the same batch.

    Raises AlreadyReserved for an episode that another batch has, StorageError (final) for one without a valid row.
    """
    hold_batches(opened, run=run)
    if opened.get(Batch, batch_id) is not None:
        return len(members_of(opened, batch_id=batch_id))
    wanted = [(attempt, group.group_id) for group in groups for attempt in group.members]
    ids = [attempt for attempt, _ in wanted]
    taken = opened.exec(select(BatchMember).where(col(BatchMember.episode).in_(ids))).all()
    if taken:
        raise AlreadyReserved(f"{taken[0].episode} is in batch {taken[0].batch} already")
    if missing := set(ids) - _trainable(opened, ids):
        raise StorageError(f"{batch_id}: no valid episode row for {', '.join(sorted(missing))}", retryable=False)
    opened.add(
        Batch(
            id=batch_id,
            run=run,
            step=step,
            policy_version=policy_version,
            waited={"to_trainable_batch": wait.seconds, **wait.parts, "median": wait.median_s, "tail": wait.tail_s},
            tail={"group": wait.tail_group, "attempt": wait.tail_attempt, "parts": wait.tail_parts},
            reserved_at=time.time(),
        )
    )
    opened.flush()
    for position, (attempt, group_id) in enumerate(wanted):
        opened.add(BatchMember(episode=attempt, batch=batch_id, group_id=group_id, position=position))
    return len(wanted)


def _trainable(opened: Session, ids: list[str]) -> set[str]:
    """Those of the attempts that are valid, of training, and have a reward."""
    statement = select(Episode.id).where(
        col(Episode.id).in_(ids),
        col(Episode.outcome).in_(VALID),
        col(Episode.reward).is_not(None),
        Episode.kind == EpisodeKind.TRAIN,
    )
    return set(opened.exec(statement).all())


def drop_groups(opened: Session, *, run: str, dropped: dict[str, list[int]]) -> None:
    """Groups that closed eligible and will train no more, by reason."""
    for reason, numbers in dropped.items():
        which = (col(Group.id).in_([f"{run}/g{number}" for number in numbers]), col(Group.eligible).is_(True))
        opened.exec(update(Group).where(*which).values(eligible=False, reason=reason))


def members_of(opened: Session, *, batch_id: str) -> list[BatchMember]:
    statement = select(BatchMember).where(BatchMember.batch == batch_id).order_by(col(BatchMember.position))
    return list(opened.exec(statement).all())


def lease_engines(opened: Session, *, run: str) -> str:
    """Lease the engines to `run`, which may be the workflow of an evaluation. Who holds them where another does; empty
    when the lease is ours."""
    one_at_a_time(opened, ENGINES)
    lease = opened.get(EngineLease, ENGINES)
    if lease is not None and lease.run != run:
        holder, evaluation = opened.get(Run, lease.run), _evaluation_of(opened, lease.run)
        if holder is not None and holder.state not in OVER:
            return lease.run
        if evaluation is not None and evaluation.state == EvaluationState.RUNNING:
            return lease.run
    upsert(opened, EngineLease(name=ENGINES, run=run, since=time.time()))
    return ""


def _evaluation_of(opened: Session, workflow: str) -> ServedEvaluation | None:
    return opened.exec(select(ServedEvaluation).where(ServedEvaluation.workflow == workflow)).first()


def release_engines(opened: Session, *, run: str) -> None:
    lease = opened.get(EngineLease, ENGINES)
    if lease is not None and lease.run == run:
        opened.delete(lease)


def judged_by(namespace: str) -> ColumnElement[bool]:
    """The runs of which this namespace can tell whether they live: its own, and those that name none."""
    return col(Run.temporal_namespace).in_(("", namespace))


def is_foreign(opened: Session, *, run: str, namespace: str) -> bool:
    """Whether the run, or the evaluation with this workflow, was started in another namespace; one without a row was
    not."""
    row = opened.get(Run, run) or _evaluation_of(opened, run)
    return row is not None and row.temporal_namespace not in ("", namespace)


def last_checkpoint(opened: Session, *, run: str) -> str:
    """Manifest key of the run's newest durable training state; empty where it has none."""
    trained = opened.exec(
        select(Batch.checkpoint).where(Batch.run == run, Batch.checkpoint != "").order_by(col(Batch.step).desc())
    ).first()
    if trained:
        return trained
    statement = select(PolicyVersion.checkpoint).where(PolicyVersion.run == run)
    return opened.exec(statement.order_by(col(PolicyVersion.version).desc())).first() or ""


class NotFound(RatchetError):
    """What was asked for is not in the lineage; the message says what is."""

    failure = FailureType.INVALID_CONFIG
    default_retryable = False


def run_row(opened: Session, *, run: str) -> Run:
    """Raises NotFound naming the runs that exist."""
    row = opened.get(Run, run)
    if row is None:
        known = opened.exec(select(Run.id).order_by(col(Run.started_at).desc()).limit(10)).all()
        there = f"the latest are: {', '.join(known)}" if known else "there are none yet"
        raise NotFound(f"no run {run!r}; {there}. One that was refused left no rows: `temporal workflow show` says why")
    return row


Trained = tuple[Batch, BatchMember | Replay, Episode]


def episodes_behind(opened: Session, *, run: str, version: int) -> list[Trained]:
    """All that trained the weights of `version`: the episodes of its own batch and of every batch before it, and behind
    those of a batch the archived successes that it used."""
    run_row(opened, run=run)
    found = opened.get(PolicyVersion, (run, version))
    if found is None:
        known = opened.exec(select(PolicyVersion.version).where(PolicyVersion.run == run)).all()
        raise NotFound(f"run {run!r} has no version {version}; it has {', '.join(map(str, sorted(known))) or 'none'}")
    rows = opened.exec(
        select(Batch, BatchMember, Episode)
        .where(BatchMember.batch == Batch.id, BatchMember.episode == Episode.id)
        .where(Batch.run == run, Batch.step <= found.step, Batch.state != VOID)
        .order_by(col(Batch.step), col(BatchMember.position))
    ).all()
    uses = opened.exec(
        select(Batch, Replay, Episode)
        .where(Replay.batch == Batch.id, Replay.episode == Episode.id)
        .where(Batch.run == run, Batch.step <= found.step, Batch.state != VOID)
        .order_by(col(Batch.step), col(Replay.group_id))
    ).all()
    both: list[Trained] = [(batch, member, episode) for batch, member, episode in rows]
    both += [(batch, use, episode) for batch, use, episode in uses]
    return sorted(both, key=lambda row: row[0].step)


def episode_fate(opened: Session, *, episode: str) -> tuple[Episode, Batch | None, list[int]]:
    """(the attempt, its batch, the versions that hold it). `episode`: an attempt id, or an episode's for its last."""
    row = opened.get(Episode, episode)
    if row is None:
        statement = select(Episode).where(Episode.episode_id == episode).order_by(col(Episode.attempt).desc())
        row = opened.exec(statement).first()
    if row is None:
        raise NotFound(f"no episode {episode!r}; ids look like <run>/g<n>/e<k>/a<m>, `ratchet lineage RUN` lists them")
    member = opened.get(BatchMember, row.id)
    batch = opened.get(Batch, member.batch) if member is not None else None
    if batch is None or batch.state == VOID:
        return row, batch, []
    versions = select(PolicyVersion.version).where(PolicyVersion.run == row.run, PolicyVersion.step >= batch.step)
    return row, batch, sorted(opened.exec(versions).all())


def attempts_of(opened: Session, *, episode: str) -> list[Episode]:
    statement = select(Episode).where(Episode.episode_id == episode).order_by(col(Episode.attempt))
    return list(opened.exec(statement).all())


def turns_of(opened: Session, *, attempt: str) -> list[Turn]:
    return list(opened.exec(select(Turn).where(Turn.episode == attempt).order_by(col(Turn.turn))).all())


def member_of(opened: Session, *, attempt: str) -> BatchMember | None:
    return opened.get(BatchMember, attempt)
