"""How much of a run's taskset still teaches: its tasks by pool, what the episodes went to, and how single tasks fare.

The pools are those of workflows/difficulty.py under the run's own `sampling` limits, so that a run that takes its tasks
in order says what the sampler would make of them. Episodes are counted to the pool that their task was drawn as; where
the run drew none, to that which the groups of earlier versions put it in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import groupby

from sqlmodel import Session

from storage import difficulty
from storage.report.parts import Part
from storage.tables import ChangedTask, Run
from workflows.config import SamplingConfig
from workflows.contracts import TaskChange
from workflows.difficulty import TEACHING, Difficulty, Tally, difficulty_of, windowed

SHOWN = 10
"""Tasks at either end, and changes, that a report names."""


class TaskVersionPart(Part):
    """A task's valid episodes whose last token one policy version made."""

    version: int
    passes: int
    episodes: int


class TaskPart(Part):
    """`pass_rate` is the estimate that decides the pool, `passes` and `episodes` what it rests on besides its prior;
    `versions` has all valid episodes of the run, by version."""

    task: str
    difficulty: str
    pass_rate: float
    passes: int
    episodes: int
    versions: list[TaskVersionPart]


class TasksetStepPart(Part):
    """`tasks`: by pool, once the groups that ended under a version had closed; without the unseen where nobody knows
    how many tasks there are. `episodes`: of that version, by the pool of their task when it was drawn."""

    version: int
    tasks: dict[str, int]
    episodes: dict[str, int]


class TaskChangePart(Part):
    task: str
    change: str
    why: str
    policy_version: int
    at: float


class TasksetPart(Part):
    sampled_by: str
    """`sampling.by`: order or difficulty."""
    tasks: int | None
    """Train tasks that the run has; None in rows older than the figure."""
    seen: int
    """Of them, those with a valid episode."""
    teaching: int
    """Of those seen, hard and learning ones."""
    by_difficulty: dict[str, int]
    episodes: dict[str, int]
    """Of the last quarter of the versions, by pool."""
    steps: list[TasksetStepPart]
    worst: list[TaskPart]
    """Lowest pass rates first."""
    best: list[TaskPart]
    """Highest first; no task is at both ends."""
    changes: list[TaskChangePart]
    """Tasks added or retired while it ran, the latest last."""


def taskset_health(opened: Session, *, row: Run, rules: SamplingConfig) -> TasksetPart:
    """The health of the taskset of the run in `row`."""
    changes = difficulty.changes(opened, run=row.id)
    history = _History(row.train_tasks, rules)
    groups = difficulty.evidence(opened, run=row.id)
    for version, closed in groupby(groups, key=lambda group: group.version):
        history.step(version, list(closed), [item for item in changes if item.policy_version <= version])
    history.settle(changes)
    tasks = sorted(history.parts(groups), key=lambda part: (part.pass_rate, -part.episodes, part.task))
    late = history.steps[-max(1, len(history.steps) // 4) :]
    return TasksetPart(
        sampled_by=rules.by,
        tasks=history.count,
        seen=len(history.pools),
        teaching=sum(pool in TEACHING for pool in history.pools.values()),
        by_difficulty=history.by_difficulty(),
        episodes=_named(sum((Counter(step.episodes) for step in late), Counter())),
        steps=history.steps,
        worst=tasks[:SHOWN],
        best=tasks[SHOWN:][-SHOWN:][::-1],
        changes=[
            TaskChangePart(
                task=item.task, change=item.change, why=item.why, policy_version=item.policy_version, at=item.at
            )
            for item in changes[-SHOWN:]
        ],
    )


class _History:
    """The pools of a run's tasks as its groups close, version by version."""

    def __init__(self, train_tasks: int | None, rules: SamplingConfig) -> None:
        self._train_tasks, self._rules = train_tasks, rules
        self._closed: dict[str, list[Tally]] = defaultdict(list)
        self._retired: set[str] = set()
        self.count = train_tasks
        self.pools: dict[str, Difficulty] = {}
        """Of the tasks with a valid episode that are not retired."""
        self.steps: list[TasksetStepPart] = []

    def step(self, version: int, groups: list[difficulty.Evidence], changes: list[ChangedTask]) -> None:
        """Take in the groups that ended under `version`; none counts for another of the same."""
        episodes: Counter[str] = Counter()
        for group in groups:
            episodes[group.drawn or self.pools.get(group.task, Difficulty.UNSEEN)] += group.tally.episodes
        for group in groups:
            self._closed[group.task].append(group.tally)
        self.settle(changes, {group.task for group in groups})
        self.steps.append(TasksetStepPart(version=version, tasks=self.by_difficulty(), episodes=_named(episodes)))

    def settle(self, changes: list[ChangedTask], tasks: Collection[str] = ()) -> None:
        """What follows for the pools from the changes so far and from new groups of `tasks`."""
        last = {item.task: item.change for item in changes}
        retired = {task for task, change in last.items() if change == TaskChange.RETIRED}
        back, self._retired = self._retired - retired, retired
        for task in {*tasks, *back}:
            if self._closed[task]:
                self.pools[task] = difficulty_of(self._tally(task), self._rules)
        for task in retired:
            self.pools.pop(task, None)
        if self._train_tasks is not None:
            added = sum(item.change == TaskChange.ADDED for item in changes)
            self.count = self._train_tasks + added - (len(changes) - added)

    def _tally(self, task: str) -> Tally:
        return windowed(reversed(self._closed[task]), self._rules.window)

    def by_difficulty(self) -> dict[str, int]:
        counts: Counter[str] = Counter(self.pools.values())
        if self.count is not None:
            counts[Difficulty.UNSEEN] = max(0, self.count - len(self.pools))
        return _named(counts)

    def parts(self, groups: list[difficulty.Evidence]) -> list[TaskPart]:
        """Every task that is in a pool."""
        versions: dict[str, Counter[int]] = defaultdict(Counter)
        passes: dict[str, Counter[int]] = defaultdict(Counter)
        for group in groups:
            for version, tally in group.by_version.items():
                versions[group.task][version] += tally.episodes
                passes[group.task][version] += tally.passes
        return [
            TaskPart(
                task=task,
                difficulty=pool,
                pass_rate=(tally := self._tally(task)).pass_rate,
                passes=tally.passes,
                episodes=tally.episodes,
                versions=[
                    TaskVersionPart(version=version, passes=passes[task][version], episodes=count)
                    for version, count in sorted(versions[task].items())
                ],
            )
            for task, pool in self.pools.items()
        ]


def _named(counts: Counter[str]) -> dict[str, int]:
    """Every pool, in the order of the words."""
    return {name.value: counts[name] for name in Difficulty}
