"""What a report holds of evaluations on the serving fingerprint, and what two of them come to beside each other.

Built from storage/evaluations.py. Called by `build_report` and by `ratchet evaluation`. Intervals are of 95 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlmodel import Session

from storage import evaluations
from storage.evaluations import Now
from storage.intervals import Interval
from storage.report.parts import Part
from storage.tables import ServedEvaluation
from workflows.contracts import WEIGHTS, settings_of


class IntervalPart(Part):
    """A mean over tasks. `low` and `high` are None where one task says nothing of others."""

    mean: float
    low: float | None
    high: float | None
    method: str
    tasks: int


class ChangePart(Part):
    """One field in which two fingerprints differ; `-` is one that is not there."""

    field: str
    before: str
    after: str


class TaskPart(Part):
    task: str
    samples: int
    passed: int
    mean_reward: float


class MeasuredPart(Part):
    """One evaluation with the fingerprint that it was made on. Without a result (`running`, `refused`, `failed`,
    `cancelled`) its `reward` is None and `reason` says why."""

    id: str
    workflow: str
    version: int
    state: str
    reason: str
    in_run: bool
    started_at: float
    ended_at: float | None
    reward: IntervalPart | None
    pass_at: dict[int, IntervalPart]
    """pass@k by k, up to the samples that every task has."""
    tasks: int
    samples_per_task: int
    episodes: int
    excluded: int
    redone: int
    fingerprint: str
    settings: str
    """Digest of the fingerprint without the weights."""
    fields: dict[str, Any]
    engines: dict[str, str]
    left_out: dict[str, str]
    stale: list[ChangePart]
    """What serves otherwise now than when it was made; empty for a result that stands."""
    task_scores: list[TaskPart]
    """The worst first."""

    @property
    def counts(self) -> bool:
        """Whether there is a result."""
        return self.reward is not None and self.state == "finished"


class TaskDifferencePart(Part):
    task: str
    first: float
    second: float


class ComparedEvaluationsPart(Part):
    """Two results, paired by task: `difference` is the second less the first."""

    first: MeasuredPart
    second: MeasuredPart
    difference: IntervalPart
    better: int
    """Tasks with a higher mean in the second."""
    worse: int
    tied: int
    p_value: float
    """Two-sided exact sign test over the tasks that differ (of one 0/1 sample per task, McNemar's)."""
    only_first: int
    """Tasks that the other does not have."""
    only_second: int
    weights_differ: bool
    changes: list[ChangePart]
    """Of the fingerprints but for the weights."""
    tasks: list[TaskDifferencePart]
    """Those that differ, the largest difference first."""


def measured(opened: Session, *, run: str) -> list[MeasuredPart]:
    """All evaluations of a run, the earliest first; only the newest result has its tasks."""
    rows = evaluations.evaluations(opened, run=run)
    now, newest = evaluations.serving(opened, run=run), newest_result(rows)
    return [measured_part(row, now, newest, with_tasks=row is newest) for row in rows]


def newest_result(rows: Sequence[ServedEvaluation]) -> ServedEvaluation | None:
    return next((row for row in reversed(rows) if row.fingerprint and row.scores), None)


def measured_part(
    row: ServedEvaluation, now: Now | None, newest: ServedEvaluation | None, *, with_tasks: bool = True
) -> MeasuredPart:
    reward = evaluations.reward(row) if row.fingerprint else None
    changed = evaluations.stale(row, now, newest) if row.fingerprint else []
    tasks = evaluations.task_scores(row) if with_tasks else []
    return MeasuredPart(
        id=row.id,
        workflow=row.workflow,
        version=row.version,
        state=row.state,
        reason=row.reason,
        in_run=row.in_run,
        started_at=row.started_at,
        ended_at=row.ended_at,
        reward=_interval(reward) if reward else None,
        pass_at={k: _interval(rate) for k, rate in evaluations.pass_rates(row).items()},
        tasks=row.tasks,
        samples_per_task=row.samples_per_task,
        episodes=sum(len(score["rewards"]) for score in row.scores.values()),
        excluded=row.excluded,
        redone=row.redone,
        fingerprint=row.fingerprint,
        settings=row.settings,
        fields=row.fields,
        engines=row.engines,
        left_out=row.left_out,
        stale=[ChangePart(**change._asdict()) for change in changed],
        task_scores=[TaskPart(**score._asdict()) for score in tasks],
    )


def with_tasks(opened: Session, row: ServedEvaluation) -> MeasuredPart:
    """One evaluation at length."""
    newest = newest_result(evaluations.evaluations(opened, run=row.run))
    return measured_part(row, evaluations.serving(opened, run=row.run), newest)


def compared(opened: Session, first: ServedEvaluation, second: ServedEvaluation) -> ComparedEvaluationsPart:
    """Raises NotFound where they have no task in common."""
    found = evaluations.compare(first, second)
    parts = [with_tasks(opened, row) for row in (first, second)]
    means = [{task.task: task.mean_reward for task in part.task_scores} for part in parts]
    both = means[0].keys() & means[1].keys()
    apart = [task for task in both if means[0][task] != means[1][task]]
    apart.sort(key=lambda task: (-abs(means[1][task] - means[0][task]), task))
    changed = evaluations.changes(settings_of(first.fields), settings_of(second.fields))
    return ComparedEvaluationsPart(
        first=parts[0],
        second=parts[1],
        difference=_interval(found.interval),
        better=found.better,
        worse=found.worse,
        tied=found.tied,
        p_value=found.p_value,
        only_first=len(means[0]) - len(both),
        only_second=len(means[1]) - len(both),
        weights_differ=bool(first.fields.get(WEIGHTS) != second.fields.get(WEIGHTS)),
        changes=[ChangePart(**change._asdict()) for change in changed],
        tasks=[TaskDifferencePart(task=task, first=means[0][task], second=means[1][task]) for task in apart],
    )


def apart(now: Now | None) -> list[str]:
    """Sentences on engines that serve the run otherwise than the one that was looked at last."""
    if now is None:
        return []
    sentences = []
    for engine, changed in now.apart:
        fields = change_words(ChangePart(**one._asdict()) for one in changed)
        sentences.append(f"{engine} serves it otherwise than {now.engine}: {fields}")
    return sentences


def change_words(changed: Iterable[ChangePart]) -> str:
    """`dtype float32 -> bfloat16, ...`"""
    return ", ".join(f"{one.field} {one.before} -> {one.after}" for one in changed)


def _interval(found: Interval) -> IntervalPart:
    return IntervalPart(**found._asdict())
