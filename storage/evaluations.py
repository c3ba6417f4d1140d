"""Evaluations on the serving fingerprint: their rows, what the episodes of each add up to, and what made it stale.

Small keyword-only functions over one open session. Called by the lineage activities, the fingerprint, the report and
`ratchet evaluation`. A task's scores are those of its episodes that are valid and whose every token is of the version.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from sqlalchemy import or_, update
from sqlmodel import Session, col, select

from storage import queries
from storage.intervals import Interval, Paired, interval_over, mean_interval, paired, pass_at_k
from storage.tables import Episode, Publication, Run, ServedEvaluation, Serving
from workflows.contracts import (
    VALID,
    EpisodeKind,
    EvaluationResult,
    EvaluationState,
    Fact,
    Measured,
    Outcome,
    RecordedEvaluation,
    fingerprint_digest,
    settings_of,
)

SHOWN_K = (1, 2, 4, 8, 16, 32, 64)
"""Of pass@k, those up to the samples per task."""


class Change(NamedTuple):
    """One field in which two fingerprints differ."""

    field: str
    before: str
    after: str


class TaskScore(NamedTuple):
    """One held-out task: mean reward, and how many of its samples passed its verifier."""

    task: str
    samples: int
    passed: int
    mean_reward: float


# --- writes -------------------------------------------------------------------------------------------------------


def put_evaluation(opened: Session, *, run: str, result: EvaluationResult, measured: Measured) -> RecordedEvaluation:
    """Write the end of an evaluation with its scores; what they add up to. What its beginning wrote stays."""
    before = opened.get(ServedEvaluation, measured.evaluation_id)
    counted = not result.refused
    scores = scores_of(opened, evaluation_id=measured.evaluation_id, version=result.version) if counted else {}
    row = ServedEvaluation(
        id=measured.evaluation_id,
        run=run,
        version=result.version,
        workflow=measured.workflow_id,
        execution=before.execution if before else "",
        temporal_namespace=before.temporal_namespace if before else "",
        in_run=measured.in_run,
        state=measured.state,
        reason=measured.reason,
        request=before.request if before else {},
        model=measured.model,
        taskset=measured.taskset,
        tasks=measured.tasks,
        samples_per_task=measured.samples_per_task,
        seed=measured.seed,
        manifest=measured.manifest,
        fields=measured.fields,
        fingerprint=fingerprint_digest(measured.fields) if counted else "",
        settings=fingerprint_digest(settings_of(measured.fields)) if counted else "",
        engines=measured.engines,
        left_out=measured.left_out,
        scores=scores,
        excluded=result.excluded,
        redone=measured.redone,
        started_at=measured.started_at,
        ended_at=time.time(),
    )
    queries.upsert(opened, row)
    found = reward(row)
    if found is None:
        return RecordedEvaluation()
    return RecordedEvaluation(mean_reward=found.mean, low=found.low, high=found.high, method=found.method)


def close_evaluation(opened: Session, *, workflow: str, state: EvaluationState, reason: str) -> None:
    """The end of one that was asked for, unless it has it already; the engines are free."""
    queries.release_engines(opened, run=workflow)
    going_on = (col(ServedEvaluation.workflow) == workflow, col(ServedEvaluation.state) == EvaluationState.RUNNING)
    ended = {"state": state, "reason": reason, "ended_at": time.time()}
    opened.exec(update(ServedEvaluation).where(*going_on).values(**ended))


def put_serving(
    opened: Session, *, run: str, version: int, engine: str, facts: Mapping[str, Fact], seen_at: float
) -> None:
    """What an engine serves of a run; the same as before keeps its date."""
    before = opened.get(Serving, (run, engine))
    if before is not None and before.facts == dict(facts):
        seen_at = before.seen_at
    queries.upsert(opened, Serving(run=run, engine=engine, version=version, facts=dict(facts), seen_at=seen_at))


# --- reads --------------------------------------------------------------------------------------------------------


def evaluations(opened: Session, *, run: str) -> list[ServedEvaluation]:
    """All of a run, the earliest first."""
    statement = select(ServedEvaluation).where(ServedEvaluation.run == run)
    return list(opened.exec(statement.order_by(col(ServedEvaluation.started_at), col(ServedEvaluation.id))).all())


def find(opened: Session, *, name: str) -> ServedEvaluation | None:
    """The evaluation of that id, or of that workflow."""
    if (row := opened.get(ServedEvaluation, name)) is not None:
        return row
    return opened.exec(select(ServedEvaluation).where(ServedEvaluation.workflow == name)).first()


def resolve(opened: Session, *, name: str, other_than: str = "") -> ServedEvaluation:
    """The evaluation of that id or workflow, or the newest result of the run of that name, the evaluation `other_than`
    aside. Raises NotFound naming what there is."""
    if (row := find(opened, name=name)) is not None:
        return row
    if opened.get(Run, name) is None:
        known = opened.exec(select(ServedEvaluation.id).order_by(col(ServedEvaluation.started_at).desc()).limit(10))
        listed = ", ".join(known.all())
        raise queries.NotFound(
            f"no evaluation and no run {name!r}; "
            + (f"the latest evaluations are: {listed}" if listed else "no evaluation was recorded yet")
        )
    finished = [row for row in evaluations(opened, run=name) if row.fingerprint]
    if not finished:
        raise queries.NotFound(f"run {name!r} has no evaluation with a fingerprint; make one:\n{command(name)}")
    if not (others := [row for row in finished if row.id != other_than]):
        raise queries.NotFound(f"run {name!r} has no result other than {other_than}; make one:\n{command(name)}")
    return others[-1]


def pair(opened: Session, *, name: str, against: str) -> tuple[ServedEvaluation, ServedEvaluation]:
    """Two results to compare, each as `resolve` has it; a run stands for its newest result that is not the other one.
    Raises NotFound, also where both name the same, or one has not ended."""
    by_run = find(opened, name=name) is None
    second = resolve(opened, name=against, other_than="" if by_run else resolve(opened, name=name).id)
    first = resolve(opened, name=name, other_than=second.id if by_run else "")
    if first.id == second.id:
        raise queries.NotFound(f"{name!r} and {against!r} are the same evaluation, {first.id}")
    for row in (first, second):
        if row.state != EvaluationState.FINISHED:
            wait = f": `temporal workflow result --workflow-id {row.workflow}` waits for it"
            raise queries.NotFound(
                f"{row.id} has no result, it is {row.state}" + (wait if row.state == EvaluationState.RUNNING else "")
            )
    return first, second


def published(opened: Session, *, run: str) -> list[int]:
    """The versions that the run has published, in their order."""
    statement = select(Publication.version).where(Publication.run == run).order_by(col(Publication.version))
    return list(opened.exec(statement).all())


def newest_version(opened: Session, *, run: str) -> int | None:
    return next(reversed(published(opened, run=run)), None)


def scores_of(opened: Session, *, evaluation_id: str, version: int) -> dict[str, dict[str, Any]]:
    """By task, the rewards and passes of the episodes that count, as `ServedEvaluation.scores` has them."""
    rows = opened.exec(
        select(Episode.episode_id, Episode.task, Episode.reward, Episode.outcome)
        .where(
            Episode.group_id == evaluation_id,
            Episode.kind == EpisodeKind.EVALUATION,
            col(Episode.outcome).in_(VALID),
            or_(col(Episode.min_version).is_(None), col(Episode.min_version) == version),
            or_(col(Episode.max_version).is_(None), col(Episode.max_version) == version),
        )
        .order_by(Episode.episode_id, col(Episode.attempt))
    ).all()
    # The last attempt that counts is the one that the workflow took.
    last = {episode: (task, reward, outcome) for episode, task, reward, outcome in rows if reward is not None}
    scores: defaultdict[str, dict[str, Any]] = defaultdict(lambda: {"rewards": [], "passed": 0})
    for task, value, outcome in last.values():
        scores[task]["rewards"].append(value)
        scores[task]["passed"] += outcome == Outcome.MODEL_SUCCESS
    return dict(sorted(scores.items()))


def rewards_of(row: ServedEvaluation) -> dict[str, list[float]]:
    """By task."""
    return {task: [float(value) for value in score["rewards"]] for task, score in sorted(row.scores.items())}


def reward(row: ServedEvaluation) -> Interval | None:
    """The mean held-out reward with its interval; None without a score."""
    rewards = list(rewards_of(row).values())
    return mean_interval(rewards) if rewards else None


def pass_rates(row: ServedEvaluation) -> dict[int, Interval]:
    """pass@k for the k up to the samples that every task has, with intervals over tasks."""
    samples = [(len(score["rewards"]), int(score["passed"])) for score in row.scores.values()]
    most = min((count for count, _ in samples), default=0)
    rates = {}
    for k in SHOWN_K:
        if k > most:
            break
        if all(count == 1 for count, _ in samples):
            rates[k] = mean_interval([[float(passed)] for _, passed in samples])
        else:
            rates[k] = interval_over([pass_at_k(count, passed, k) for count, passed in samples])
    return rates


def task_scores(row: ServedEvaluation) -> list[TaskScore]:
    """Every task, the worst first."""
    found = [
        TaskScore(task, len(score["rewards"]), int(score["passed"]), fmean(score["rewards"]))
        for task, score in row.scores.items()
    ]
    return sorted(found, key=lambda score: (score.mean_reward, score.task))


def compare(first: ServedEvaluation, second: ServedEvaluation) -> Paired:
    """The second less the first, on the tasks of both. Raises NotFound where they have none in common."""
    try:
        return paired(rewards_of(first), rewards_of(second))
    except ValueError as error:
        raise queries.NotFound(f"{first.id} and {second.id} can't be compared: {error}") from None


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Field by field, in the order of their names; a field that one does not have is `-`."""
    names = sorted(before.keys() | after.keys())
    pairs = [(name, _word(before.get(name)), _word(after.get(name))) for name in names]
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def _word(value: Any) -> str:
    return "-" if value is None or value == "" else str(value).lower() if isinstance(value, bool) else str(value)


class Now(NamedTuple):
    """What serves a run now, as far as is known: each engine's part of a fingerprint."""

    facts: dict[str, Any]
    """Of the engine that was noted last."""
    engine: str
    seen_at: float
    apart: list[tuple[str, list[Change]]]
    """Engines that serve it otherwise."""


def serving(opened: Session, *, run: str) -> Now | None:
    """None where no engine was ever seen to serve it."""
    statement = select(Serving).where(Serving.run == run)
    rows = list(opened.exec(statement.order_by(col(Serving.seen_at).desc(), Serving.engine)).all())
    if not rows:
        return None
    # One that serves an older version than the newest was left behind, and says nothing of what serves now.
    current = [row for row in rows if row.version == max(item.version for item in rows)]
    newest = current[0]
    apart = [(row.engine, found) for row in current[1:] if (found := changes(newest.facts, row.facts))]
    return Now(dict(newest.facts), newest.engine, newest.seen_at, apart)


def stale(row: ServedEvaluation, now: Now | None, newest: ServedEvaluation | None) -> list[Change]:
    """What makes a result one of what does not serve any more: fields of the engines that are now otherwise, and what
    the newest result was made with (prompts, tasks, sampling). The weights are not among them: another version is
    another result."""
    reference: dict[str, Any] = settings_of(newest.fields) if newest is not None else settings_of(row.fields)
    if now is not None and (newest is None or now.seen_at > newest.started_at):
        reference = reference | now.facts
    return changes(settings_of(row.fields), reference)


def command(run: str, *, version: int | None = None, samples: int | None = None, workflow_id: str = "") -> str:
    """The command that makes another evaluation; what is None is left to the run's configuration."""
    fields = {"run": run, "version": version, "samples_per_task": samples}
    wanted = json.dumps({name: value for name, value in fields.items() if value is not None})
    name = shlex.quote(workflow_id or f"{run}/eval-1")
    return (
        f"temporal workflow start --task-queue episodes --type Evaluation --workflow-id {name}"
        f" --input {shlex.quote(wanted)}"
    )


def another(opened: Session, *, run: str, like: ServedEvaluation | None = None) -> str:
    """`command` with an id that is not taken. `like`: of its version, with as many samples."""
    taken = {row.workflow for row in evaluations(opened, run=run)}
    number = next(number for number in range(1, len(taken) + 2) if f"{run}/eval-{number}" not in taken)
    version, samples = (like.version, like.samples_per_task) if like is not None else (None, None)
    return command(run, version=version, samples=samples, workflow_id=f"{run}/eval-{number}")
