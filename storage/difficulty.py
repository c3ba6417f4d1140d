"""The rows behind a run's tasks: what it drew and when, what came of it, which tasks it has; and the next draws.

A draw is a row that never changes, keyed by the run and its number: whoever asks for it again, after a crash, a
continue-as-new or a retry, gets what was drawn. What is drawn follows from the seed and the rows, by the rules of
workflows/difficulty.py; rewards in quarantine are no evidence. A run that resumes from another goes on from that one's
evidence and order, as long as both have the same taskset. Keyword-only, over one open session. Called by the activities
that draw and change tasks, and by the report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import sqlalchemy
from sqlalchemy import ColumnElement, func
from sqlmodel import Session, col, select

from storage import queries
from storage.database import one_at_a_time
from storage.quarantine import holding, in_quarantine
from storage.tables import ChangedTask, Draw, Episode, Group, Run
from workflows.config import SamplingConfig
from workflows.contracts import VALID, EpisodeKind, Outcome, TaskChange
from workflows.difficulty import Known, Sampler, Tally, windowed

MOST_FOREBEARS = 50


def task_id_of(key: str) -> str:
    """`count-17` of `shell/count-17`. Within a run the id alone names the task."""
    return key.rpartition("/")[2]


def alone(opened: Session, *, run: str) -> None:
    """Until the transaction ends, no other draws or changes tasks of the run."""
    one_at_a_time(opened, f"tasks of {run}")


def forebears(opened: Session, *, run: str) -> list[Run]:
    """The runs of the same taskset that this one goes on from, the oldest first, and itself last."""
    found = [queries.run_row(opened, run=run)]
    while len(found) < MOST_FOREBEARS and (source := found[-1].resume_from):
        earlier = opened.get(Run, source)
        known = {row.id for row in found}
        if earlier is None or earlier.id in known or earlier.config.get("taskset") != found[-1].config.get("taskset"):
            break
        found.append(earlier)
    return found[::-1]


def known_tasks(opened: Session, *, run: str, window: int) -> dict[str, Known]:
    """What is known of every task that the run, or one that it goes on from, has drawn."""
    tallies: dict[str, list[Tally]] = defaultdict(list)
    last: dict[str, int] = {}
    *earlier, own = (_groups(opened, row.id) for row in forebears(opened, run=run))
    before = [group for groups in earlier for group in groups]
    # Draws of the run itself have numbers from 0 on, and not below those of their groups.
    numbered = [*enumerate(before, start=-len(before)), *((group.number, group) for group in own)]
    for number, group in numbered:
        last[group.task_id] = number
        if group.tally.episodes:
            tallies[group.task_id].append(group.tally)
    for key, number in opened.exec(select(Draw.task, func.max(Draw.number)).where(Draw.run == run).group_by(Draw.task)):
        task_id = task_id_of(key)
        last[task_id] = max(number, last.get(task_id, number))
    return {task_id: Known(windowed(reversed(tallies[task_id]), window), at) for task_id, at in last.items()}


class _Closed(NamedTuple):
    number: int
    task_id: str
    tally: Tally


def _groups(opened: Session, run: str) -> list[_Closed]:
    """Closed groups by number. Their endings are counted when they close: what ends later is not in them."""
    wrong = _wrong(opened, run)
    statement = select(Group.number, Group.task, Group.outcomes).where(Group.run == run).order_by(col(Group.number))
    return [
        _Closed(number, task_id_of(task), _tally(outcomes, wrong.get(number, Counter())))
        for number, task, outcomes in opened.exec(statement)
    ]


def _tally(outcomes: Mapping[str, int], wrong: Mapping[str, int]) -> Tally:
    """Of the valid endings alone, as the table of outcomes has them."""
    passes, failures = (
        max(0, int(outcomes.get(name, 0)) - wrong.get(name, 0))
        for name in (Outcome.MODEL_SUCCESS, Outcome.MODEL_FAILURE)
    )
    return Tally(passes, passes + failures)


def _wrong(opened: Session, run: str) -> dict[int, Counter[str]]:
    """Endings whose rewards are in quarantine, by group."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    if holding(opened, run=run):
        endings = select(Episode.group_id, Episode.outcome, func.count()).where(*_valid(run), in_quarantine())
        for group_id, outcome, count in opened.exec(endings.group_by(Episode.group_id, Episode.outcome)):
            found[_number(group_id)][outcome] += count
    return found


def _valid(run: str) -> tuple[ColumnElement[bool], ...]:
    """The run's training episodes that say something of their task."""
    return col(Episode.run) == run, col(Episode.kind) == EpisodeKind.TRAIN, col(Episode.outcome).in_(VALID)


def _number(group_id: str) -> int:
    return int(group_id.rpartition("/g")[2])


class Members(NamedTuple):
    """How a run's tasks differ from its taskset's: `added`, ids and their tasksets, in the order in which they were
    added; `retired`, ids."""

    added: dict[str, str]
    retired: set[str]


def members(opened: Session, *, run: str) -> Members:
    found = Members({}, set())
    for row in changes(opened, run=run):
        task_id, taskset = task_id_of(row.task), row.task.rpartition("/")[0]
        if row.change == TaskChange.RETIRED:
            found.retired.add(task_id)
        else:
            found.retired.discard(task_id)
            found.added.setdefault(task_id, taskset)
    return found


def changes(opened: Session, *, run: str) -> list[ChangedTask]:
    """In the order in which they were made."""
    statement = select(ChangedTask).where(ChangedTask.run == run)
    return list(opened.exec(statement.order_by(col(ChangedTask.number), col(ChangedTask.position))).all())


class Drawn(NamedTuple):
    """`rows` by number, fewer than were asked for where no task is left; the ids `excluded` from now on; and the tasks
    that may be drawn, by difficulty."""

    rows: list[Draw]
    excluded: set[str]
    tasks: dict[str, int]


def draw(
    opened: Session,
    *,
    run: str,
    taskset: str,
    order: Sequence[str],
    rules: SamplingConfig,
    seed: int,
    cursor: int,
    count: int,
    held: Collection[str],
    policy_version: int,
    now: float,
) -> Drawn:
    """The draws from `cursor` on, made where they are not there yet. `taskset`: the run's own, by the name that rows
    have; `order`: its train tasks in the order in which the run meets them; `held`: those in quarantine. The caller is
    `alone`."""
    found = members(opened, run=run)
    excluded = found.retired | set(held)
    tasksets = {task_id: taskset for task_id in order}
    tasksets |= {task_id: name for task_id, name in found.added.items() if task_id not in tasksets}
    known = known_tasks(opened, run=run, window=rules.window)
    fresh = [task_id for task_id in [*found.added, *order] if task_id not in known and task_id not in excluded]
    sampler = Sampler(
        rules,
        seed,
        fresh=dict.fromkeys(fresh),
        known={name: item for name, item in known.items() if name in tasksets and name not in excluded},
    )
    tasks = sampler.tasks
    numbers = range(cursor, cursor + count)
    asked = (Draw.run == run, col(Draw.number) >= numbers.start, col(Draw.number) < numbers.stop)
    rows = {row.number: row for row in opened.exec(select(Draw).where(*asked))}
    for number in numbers:
        if number in rows or (drawn := sampler.draw(number)) is None:
            continue
        task_id, difficulty = drawn
        rows[number] = Draw(
            run=run,
            number=number,
            task=f"{tasksets[task_id]}/{task_id}",
            difficulty=difficulty,
            policy_version=policy_version,
            drawn_at=now,
        )
        opened.add(rows[number])
    return Drawn([rows[number] for number in sorted(rows)], excluded, tasks)


class Evidence(NamedTuple):
    """The valid training episodes of one closed group. `drawn`: the difficulty that its task was drawn as; empty where
    the run took its tasks in order."""

    number: int
    task: str
    by_version: dict[int, Tally]
    """By the policy version that made an episode's last token."""
    drawn: str

    @property
    def version(self) -> int:
        return max(self.by_version)

    @property
    def tally(self) -> Tally:
        passes, episodes = zip(*self.by_version.values(), strict=True)
        return Tally(sum(passes), sum(episodes))


def evidence(opened: Session, *, run: str) -> list[Evidence]:
    """The run's own groups with valid episodes, by the version that ended them, then by number."""
    drawn = dict(
        opened.exec(
            select(Group.number, Draw.difficulty)
            .join(Draw, (col(Draw.run) == Group.run) & (col(Draw.number) == Group.draw))
            .where(Group.run == run)
        ).all()
    )
    counted = (col(Episode.group_id), col(Episode.task), col(Episode.outcome), col(Episode.max_version))
    # SQLAlchemy's own select: SQLModel types at most four columns.
    statement = sqlalchemy.select(*counted, func.count()).where(*_valid(run), ~in_quarantine()).group_by(*counted)
    found: dict[tuple[int, str], dict[int, Tally]] = defaultdict(dict)
    for group_id, task, outcome, version, count in opened.connection().execute(statement):
        by_version = found[_number(group_id), task]
        before = by_version.get(version or 0, Tally())
        passes = count if outcome == Outcome.MODEL_SUCCESS else 0
        by_version[version or 0] = Tally(before.passes + passes, before.episodes + count)
    made = [Evidence(number, task, counts, drawn.get(number, "")) for (number, task), counts in found.items()]
    return sorted(made, key=lambda item: (item.version, item.number))
