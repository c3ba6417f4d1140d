"""Rewards that were wrong: an operator's marks on tasks and on attempts, and what they mean for a row of Episode.

Owns the rows of QuarantineMark and the one predicate that all readers share, `in_quarantine`. A mark on a task is on
all its episodes in one run, also on those that end later. Marks are never deleted: undone they stay, with who, when and
why, and the same mark again begins the next row. Keyword-only functions over one open session; called by `ratchet
quarantine`, by the archive, by the reservation of a batch and by every figure that counts rewards.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import sqlalchemy
from sqlalchemy import ColumnElement, literal
from sqlmodel import Session, col, select

from storage.queries import OVER, NotFound, hold_batches, run_row
from storage.tables import Episode, Group, QuarantineMark, Run, Task

TASK, EPISODE = "task", "episode"
"""Kinds of marks."""
REASON = "quarantined"
"""Why a group does not train that lost too many attempts, or its signal, to a mark."""
SHOWN = 10
_PLACE = re.compile(r"(?P<run>.+?)/(?P<group>g\d+|eval-v\d+)(?:/.*)?")
"""Ids of groups, episodes and attempts."""


class Target(NamedTuple):
    """What a mark is on. `id`: a task's key or an attempt's id; `runs`: those in which it has a meaning."""

    kind: str
    id: str
    runs: list[str]


def in_quarantine() -> ColumnElement[bool]:
    """Whether the row of Episode, which the statement around this must select from, is marked or its task is."""
    by_task = (col(QuarantineMark.kind) == TASK) & (col(QuarantineMark.target) == col(Episode.task))
    by_id = (col(QuarantineMark.kind) == EPISODE) & (col(QuarantineMark.target) == col(Episode.id))
    marks = sqlalchemy.select(literal(1)).where(
        col(QuarantineMark.run) == col(Episode.run), col(QuarantineMark.undone_at).is_(None), by_task | by_id
    )
    return marks.correlate(Episode).exists()


def covered_by(target: Target) -> ColumnElement[bool]:
    """Whether the row of Episode is one that a mark on the target marks."""
    of_kind = col(Episode.task) if target.kind == TASK else col(Episode.id)
    return (of_kind == target.id) & col(Episode.run).in_(target.runs)


# --- marks ------------------------------------------------------------------------------------------------------------


def put_mark(opened: Session, *, run: str, target: Target, why: str, by: str) -> tuple[QuarantineMark, bool]:
    """The mark that holds from now on, and whether it is new: one that held before stays as it was."""
    hold_batches(opened, run=run)
    newest = _newest(opened, run, target)
    if newest is not None and newest.undone_at is None:
        return newest, False
    number = 0 if newest is None else newest.number + 1
    made = QuarantineMark(run=run, kind=target.kind, target=target.id, number=number, why=why, by=by, since=time.time())
    opened.add(made)
    opened.flush()
    return made, True


def undo_mark(opened: Session, *, run: str, target: Target, why: str, by: str) -> tuple[QuarantineMark | None, bool]:
    """The newest mark, which holds no more, and whether this undid it; None where there never was one."""
    hold_batches(opened, run=run)
    newest = _newest(opened, run, target)
    if newest is None or newest.undone_at is not None:
        return newest, False
    newest.undone_at, newest.undone_by, newest.undone_why = time.time(), by, why
    opened.add(newest)
    opened.flush()
    return newest, True


def _newest(opened: Session, run: str, target: Target) -> QuarantineMark | None:
    statement = select(QuarantineMark).where(
        QuarantineMark.run == run, QuarantineMark.kind == target.kind, QuarantineMark.target == target.id
    )
    return opened.exec(statement.order_by(col(QuarantineMark.number).desc())).first()


def marks(opened: Session, *, run: str) -> list[QuarantineMark]:
    """All of a run, those that were undone too, oldest first."""
    statement = select(QuarantineMark).where(QuarantineMark.run == run)
    return list(opened.exec(statement.order_by(col(QuarantineMark.since), col(QuarantineMark.target))).all())


def holding(opened: Session, *, run: str) -> list[QuarantineMark]:
    """Those that were not undone."""
    return [mark for mark in marks(opened, run=run) if mark.undone_at is None]


def mark_on(opened: Session, *, attempt: Episode) -> QuarantineMark | None:
    """The mark that holds the attempt in quarantine, the oldest where there are several."""
    named = {(TASK, attempt.task), (EPISODE, attempt.id)}
    return next((mark for mark in holding(opened, run=attempt.run) if (mark.kind, mark.target) in named), None)


# --- what a person names ----------------------------------------------------------------------------------------------


def find_task(opened: Session, *, task: str, run: str = "") -> Target:
    """The task of that key, or of that id where one taskset alone has it, in the run: else in every run that has tried
    it, and in every one that goes on with its taskset. Raises NotFound naming what there is."""
    if run:
        run_row(opened, run=run)
    key = _task_key(opened, task, run)
    tried = set(opened.exec(select(Episode.run).where(Episode.task == key).distinct()).all())
    of_task = (QuarantineMark.kind == TASK, QuarantineMark.target == key)
    tried |= set(opened.exec(select(QuarantineMark.run).where(*of_task).distinct()).all())
    going = {row.id for row in _going(opened) if _may_admit(opened, row, key)}
    runs = sorted(tried | going) if not run else [run]
    if run and run not in tried | going:
        raise NotFound(f"run {run!r} has not tried task {key}; {_there_are(_tasks_of(opened, run), key)}")
    if not runs:
        raise NotFound(f"no run has tried task {key}")
    return Target(TASK, key, runs)


def _task_key(opened: Session, task: str, run: str) -> str:
    rows = select(Task.id).where((col(Task.id) == task) | (col(Task.task_id) == task))
    tried = select(Episode.task).where(Episode.task == task).distinct()
    keys = {*opened.exec(rows).all(), *opened.exec(tried).all()}
    if run and len(keys) > 1:
        keys &= set(_tasks_of(opened, run))
    if len(keys) > 1:
        raise NotFound(f"task {task!r} is in more than one taskset: name one of {', '.join(sorted(keys))}")
    if not keys:
        raise NotFound(f"no task {task!r}; {_there_are(_tasks_of(opened, run), task)}")
    return keys.pop()


def _tasks_of(opened: Session, run: str) -> list[str]:
    """The tasks that the run has tried, or any run has."""
    statement = select(Episode.task).distinct().order_by(Episode.task)
    return list(opened.exec(statement.where(Episode.run == run) if run else statement).all())


def _there_are(keys: list[str], wanted: str) -> str:
    """Those that look like the one that was asked for, else the first."""
    if not keys:
        return "none has been tried yet"
    ends = {key.rpartition("/")[2]: key for key in keys}
    near = difflib.get_close_matches(wanted, keys, SHOWN // 2)
    near += [ends[end] for end in difflib.get_close_matches(wanted.rpartition("/")[2], list(ends), SHOWN // 2)]
    if near:
        return f"there are {', '.join(dict.fromkeys(near))}"
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"there are {', '.join(keys[:SHOWN])}{more}"


def _going(opened: Session) -> Iterable[Run]:
    return opened.exec(select(Run).where(col(Run.state).not_in(OVER))).all()


def _may_admit(opened: Session, row: Run, key: str) -> bool:
    """Whether the run takes its tasks from the taskset of this one."""
    taskset = key.rpartition("/")[0]
    named = str(row.config.get("taskset", "shell"))
    if taskset in (named, str(Path(named).expanduser().resolve())):
        return True
    # A folder is named from where the workers are, which may be another than ours.
    same = opened.exec(select(Episode.task).where(Episode.run == row.id).limit(1)).first()
    return same is not None and same.rpartition("/")[0] == taskset


def find_episode(opened: Session, *, episode: str, run: str = "") -> Target:
    """The attempt of that id, or the last one at that episode. Raises NotFound naming what there is."""
    row = opened.get(Episode, episode)
    if row is None:
        attempts = select(Episode).where(Episode.episode_id == episode).order_by(col(Episode.attempt).desc())
        row = opened.exec(attempts).first()
    if row is None:
        raise NotFound(f"no episode {episode!r}: {_whats_there(opened, episode)}")
    if run and row.run != run:
        raise NotFound(f"episode {row.id} is of run {row.run!r}, not of {run!r}")
    return Target(EPISODE, row.id, [row.run])


def _whats_there(opened: Session, episode: str) -> str:
    place = _PLACE.fullmatch(episode)
    if place is None:
        return "ids look like <run>/g<n>/e<k>/a<m>, `ratchet lineage RUN` lists them"
    try:
        run = run_row(opened, run=place["run"]).id
    except NotFound as missing:
        return str(missing)
    group = f"{run}/{place['group']}"
    ended = opened.exec(select(Episode.id).where(Episode.group_id == group).order_by(Episode.id)).all()
    if ended:
        more = f" and {len(ended) - SHOWN} more" if len(ended) > SHOWN else ""
        return f"of {group} there are {', '.join(ended[:SHOWN])}{more}; an attempt is there once it has ended"
    last = opened.exec(select(Group.number).where(Group.run == run).order_by(col(Group.number).desc())).first()
    closed = "none has closed yet" if last is None else f"the last one that closed is {run}/g{last}"
    return f"run {run!r} has no attempts of group {place['group']}; {closed}"
