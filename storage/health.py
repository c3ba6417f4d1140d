"""What the rows say of a run's environment and engines: what was lost where, which tasks flake, who lags.

Reads only, keyword-only, over one open session. Called by the report.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import sqlalchemy
from sqlalchemy import ColumnElement, case, func, true
from sqlmodel import Session, col, select

from storage.tables import Batch, BatchMember, EngineLoad, Episode, Publication, Turn
from workflows.contracts import VALID, EpisodeKind, Outcome, StopReason

LOST = (Outcome.INFRA_FAILURE, Outcome.UNKNOWN)
BOUNDARIES: dict[str, str] = {
    StopReason.ENGINE_LOST: "engine",
    StopReason.SANDBOX_LOST: "sandbox",
    StopReason.STORAGE_LOST: "storage",
    StopReason.VERIFIER_LOST: "verifier",
}
"""The service that was lost, by stop reason; every other ending that is not valid is nobody's."""
UNKNOWN = "unknown"
CUT = "…"
"""How the start of a longer action ends in a turn's row."""
_HOST = re.compile(r"(?:of host|lives on) (\w[\w.-]*)|\bhost (\w[\w.-]*): |no answer from (\S+):")
"""How failures of a sandbox's host name it where its attempt never learnt of one."""
DEAD_LOSSES = 2
"""So many in a row, and nothing since that ended well, and the host counts as dead."""


class Loss(NamedTuple):
    """Attempts that were lost at one place. `place`: an engine or a host; empty where the failure names none."""

    boundary: str
    place: str
    attempts: int
    reproducible: int
    """Those whose image and tokens are recorded: `ratchet replay` runs their commands again."""
    why: str
    """The commonest of their reasons."""
    example: str
    """One of them, by id."""


class LostAttempt(NamedTuple):
    """One attempt that was lost, and where. `whole`: its image and tokens are recorded."""

    boundary: str
    place: str
    row: Episode
    whole: bool


def losses(opened: Session, *, run: str, since: float = 0.0, until: float = float("inf")) -> list[Loss]:
    """Lost training attempts that ended between two moments, the place with the most first."""
    ended = col(Episode.ended_at)
    within = (col(Episode.kind) == EpisodeKind.TRAIN) & (ended >= since) & (ended <= until)
    places: dict[tuple[str, str], list[LostAttempt]] = defaultdict(list)
    for item in lost_attempts(opened, run=run, which=within):
        places[item.boundary, item.place].append(item)
    found = [_loss(*where, lost) for where, lost in places.items()]
    return sorted(found, key=lambda loss: (-loss.attempts, loss.boundary, loss.place))


def lost_attempts(opened: Session, *, run: str, which: ColumnElement[bool] | None = None) -> list[LostAttempt]:
    """Every attempt that was lost, of training or evaluation, in the order of their ids. `which`: as in `doings`."""
    rows = opened.exec(
        select(Episode)
        .where(Episode.run == run, col(Episode.outcome).in_(LOST), which if which is not None else true())
        .order_by(Episode.id)
    ).all()
    engines = set(opened.exec(select(EngineLoad.engine).where(EngineLoad.run == run).distinct()).all())
    turns = _turns(opened, [row.id for row in rows])
    found = []
    for row in rows:
        boundary, its = BOUNDARIES.get(row.stop_reason, UNKNOWN), turns[row.id]
        whole = bool(row.image_id) and all(turn.segment for turn in its)
        found.append(LostAttempt(boundary, _place(row, boundary, its, engines), row, whole))
    return found


def _turns(opened: Session, attempts: list[str]) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = defaultdict(list)
    for start in range(0, len(attempts), 500):
        chunk = col(Turn.episode).in_(attempts[start : start + 500])
        for turn in opened.exec(select(Turn).where(chunk).order_by(col(Turn.turn))).all():
            found[turn.episode].append(turn)
    return found


def _place(row: Episode, boundary: str, turns: list[Turn], engines: set[str]) -> str:
    if boundary == "engine":
        named = [
            engine for engine in sorted(engines) if re.search(rf"(?<![\w.-]){re.escape(engine)}(?![\w-])", row.why)
        ]
        # An episode stays with its engine: the one that answered last was asked next.
        return named[0] if named else turns[-1].engine if turns else ""
    if row.host and boundary in ("sandbox", "verifier"):
        return row.host
    found = _HOST.search(row.why)
    return next(name for name in found.groups() if name) if found else ""


def _loss(boundary: str, place: str, lost: list[LostAttempt]) -> Loss:
    whole = [item for item in lost if item.whole]
    (why, _), *_ = Counter(item.row.why for item in lost).most_common(1)
    example = max((whole or lost), key=lambda item: item.row.id).row.id
    return Loss(boundary, place, len(lost), len(whole), why, example)


class HostHealth(NamedTuple):
    """The attempts of a run whose last sandbox lived on one host, without surplus."""

    host: str
    attempts: int
    lost: int
    """Those whose sandbox was lost."""
    well_at: float | None
    """When the last one ended valid there."""
    lost_since: list[str]
    """Those that were lost after that, the last one last."""
    why: str
    """Of the last one that was lost."""

    @property
    def dead(self) -> bool:
        return len(self.lost_since) >= DEAD_LOSSES


def hosts(opened: Session, *, run: str) -> list[HostHealth]:
    """The sandbox hosts of a run, in the order of their names; none in rows that are older than the column."""
    # SQLAlchemy's own select: SQLModel types at most four columns.
    statement = (
        sqlalchemy.select(Episode.host, Episode.id, Episode.outcome, Episode.stop_reason, Episode.ended_at, Episode.why)  # type: ignore[call-overload]
        .where(Episode.run == run, Episode.host != "", Episode.outcome != Outcome.SURPLUS)
        .order_by(col(Episode.host), col(Episode.ended_at), col(Episode.id))
    )
    rows = opened.connection().execute(statement)
    return [_host(name, list(group)) for name, group in groupby(rows, key=lambda row: str(row[0]))]


def _host(name: str, rows: list[Any]) -> HostHealth:
    since: list[str] = []
    lost, well_at, why = 0, None, ""
    for _, attempt, outcome, reason, ended_at, said in rows:
        if outcome in VALID:
            well_at, since = ended_at, []
        elif reason == StopReason.SANDBOX_LOST:
            lost, why = lost + 1, said
            since.append(attempt)
    return HostHealth(name, len(rows), lost, well_at, since, why)


class TaskLoss(NamedTuple):
    task: str
    lost: int
    attempts: int


def task_losses(opened: Session, *, run: str) -> list[TaskLoss]:
    """Tasks that lost an attempt, of training or evaluation, the largest share first; surplus is no attempt here."""
    lost = func.sum(case((col(Episode.outcome).in_(LOST), 1), else_=0))
    rows = opened.exec(
        select(Episode.task, lost, func.count())
        .where(Episode.run == run, Episode.outcome != Outcome.SURPLUS)
        .group_by(Episode.task)
        .having(lost > 0)
    ).all()
    found = [TaskLoss(task, int(lost), attempts) for task, lost, attempts in rows]
    return sorted(found, key=lambda item: (-item.lost / item.attempts, -item.lost, item.task))


class Flake(NamedTuple):
    """Two attempts at one task that did and saw the same and were scored differently."""

    task: str
    one: str
    reward: float
    other: str
    other_reward: float


def flakes(opened: Session, *, run: str) -> list[Flake]:
    """The tasks that scored the same commands, outputs and answer differently, one pair each, in order of their names.

    Attempts whose rows cut an action short, or lack a digest of an output, can't be compared.
    """
    seen: dict[tuple[str, bytes], tuple[str, float]] = {}
    found: dict[str, Flake] = {}
    for attempt, task, reward, digest in doings(opened, run=run):
        first, its_reward = seen.setdefault((task, digest), (attempt, reward))
        if abs(its_reward - reward) > 1e-9:
            found.setdefault(task, Flake(task, first, its_reward, attempt, reward))
    return [found[task] for task in sorted(found)]


def doings(
    opened: Session, *, run: str, which: ColumnElement[bool] | None = None
) -> Iterator[tuple[str, str, float, bytes]]:
    """(attempt, task, reward, digest of what it did and saw) of every valid attempt that can be compared. `which`: of
    rows of Episode that it holds for alone."""
    did = (Turn.action, Turn.exit_code, Turn.timed_out, Turn.output_digest)
    # SQLAlchemy's own select: SQLModel types at most four columns.
    statement = (
        sqlalchemy.select(Episode.id, Episode.task, Episode.reward, Episode.stop_reason, *did)  # type: ignore[call-overload]
        .join(Turn, col(Turn.episode) == Episode.id)
        .where(Episode.run == run, col(Episode.outcome).in_(VALID), col(Episode.reward).is_not(None))
        .where(which if which is not None else true())
        .order_by(col(Episode.id), col(Turn.turn))
    )
    rows = opened.connection().execute(statement)
    for (attempt, task, reward, reason), group in groupby(rows, key=lambda row: tuple(row[:4])):
        turns = [tuple(row[4:]) for row in group]
        if all(_comparable(*turn) for turn in turns):
            digest = hashlib.sha256(repr((reason, turns)).encode("utf-8", "surrogatepass")).digest()
            yield attempt, task, float(reward), digest


def _comparable(action: str, exit_code: int | None, timed_out: bool, digest: str) -> bool:
    ran = exit_code is not None or timed_out
    return not action.endswith(CUT) and (bool(digest) or not ran)


class Replays(NamedTuple):
    """Attempts that lost a sandbox and went on in a fresh one, and those of them that ended valid."""

    attempts: int
    valid: int


def replays(opened: Session, *, run: str) -> Replays:
    valid = func.sum(case((col(Episode.outcome).in_(VALID), 1), else_=0))
    attempts, ended = opened.exec(select(func.count(), valid).where(Episode.run == run, Episode.replays > 0)).one()
    return Replays(attempts, int(ended or 0))


def batch_versions(opened: Session, *, run: str) -> dict[int, tuple[int, int]]:
    """By step, the oldest and the newest version that made tokens of its batch."""
    rows = opened.exec(
        select(Batch.step, func.min(Episode.min_version), func.max(Episode.max_version))
        .join(BatchMember, col(BatchMember.batch) == Batch.id)
        .join(Episode, col(BatchMember.episode) == Episode.id)
        .where(Batch.run == run, col(Batch.trained_at).is_not(None))
        .group_by(col(Batch.step))
    ).all()
    return {step: (low, high) for step, low, high in rows if low is not None and high is not None}


def tasks_of(opened: Session, *, attempts: list[str]) -> dict[str, str]:
    """The task of each attempt that has a row."""
    rows = opened.exec(select(Episode.id, Episode.task).where(col(Episode.id).in_(attempts))).all()
    return {attempt: task for attempt, task in rows}


class EngineHealth(NamedTuple):
    """One engine's loads over the run."""

    engine: str
    loads: int
    unproven: int
    pause_s: float | None
    """Mean over its proven loads."""
    newest: int | None
    """Newest version that it has proven."""
    behind: int
    """Versions between that one and the run's newest."""


def engines(opened: Session, *, run: str) -> list[EngineHealth]:
    """In the order of their names."""
    newest = opened.exec(select(func.max(Publication.version)).where(Publication.run == run)).one()
    rows = opened.exec(select(EngineLoad).where(EngineLoad.run == run).order_by(col(EngineLoad.engine))).all()
    found = []
    for engine, group in groupby(rows, key=lambda row: row.engine):
        loads = list(group)
        proven = [load for load in loads if load.proven]
        best = max((load.version for load in proven), default=None)
        pause = sum(load.pause_s for load in proven) / len(proven) if proven else None
        behind = 0 if newest is None else newest - (best if best is not None else -1)
        found.append(EngineHealth(engine, len(loads), len(loads) - len(proven), pause, best, behind))
    return found
