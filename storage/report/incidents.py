"""What went wrong in a run, from its rows, as one list in time order: lost attempts by place, batches that taught
nothing, what went into quarantine, weight updates, evaluations that made no result, and the run's own end.

Only what a row has a time for is here: a degraded run says so while it is, and leaves no row of it. Called by
`build_report`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from sqlmodel import Session, col, select

from storage import health, series
from storage.report.model import Report
from storage.report.parts import IncidentPart
from storage.report.weight_parts import WeightTroublePart
from storage.tables import ServedEvaluation
from storage.weight_tries import RESTARTED
from workflows.contracts import EvaluationState, RunState

QUIET_S = 300.0
"""Losses at one place that are further apart are two incidents."""
NO_RESULT = (EvaluationState.REFUSED, EvaluationState.FAILED)


def incidents(opened: Session, report: Report) -> list[IncidentPart]:
    """All of them, in the order in which they began."""
    found = [*_losses(opened, report.run), *_void(opened, report), *_quarantines(report), *_weights(report)]
    found += [*_evaluations(opened, report.run), *_state(report)]
    return sorted(found, key=lambda item: (item.at, item.what, item.where))


def _losses(opened: Session, run: str) -> Iterator[IncidentPart]:
    places: dict[tuple[str, str], list[health.LostAttempt]] = defaultdict(list)
    for item in health.lost_attempts(opened, run=run):
        places[item.boundary, item.place].append(item)
    for lost in places.values():
        together: list[health.LostAttempt] = []
        for item in sorted(lost, key=lambda item: item.row.ended_at):
            if together and item.row.ended_at - together[-1].row.ended_at > QUIET_S:
                yield _lost(together)
                together = []
            together.append(item)
        yield _lost(together)


def _lost(together: list[health.LostAttempt]) -> IncidentPart:
    first, last = together[0], together[-1]
    (why, _), *_ = Counter(item.row.why for item in together).most_common(1)
    known = first.boundary != health.UNKNOWN
    return IncidentPart(
        at=first.row.ended_at,
        until=last.row.ended_at,
        what=f"{first.boundary} lost" if known else "nobody knows whose fault",
        where=first.place,
        count=len(together),
        why=why,
        example=last.row.id,
    )


def _void(opened: Session, report: Report) -> Iterator[IncidentPart]:
    groups = {item.batch_id: item.groups for item in report.void_batches}
    for row in series.void_batches(opened, run=report.run):
        where = f"step {row.step}, {row.id}"
        yield _one(row.reserved_at, "batch taught nothing", where, row.reason, count=groups.get(row.id, 0))


def _quarantines(report: Report) -> Iterator[IncidentPart]:
    for item in report.quarantined:
        yield _one(item.since, "task in quarantine", item.task, item.why)
    for mark in report.rewards.marks:
        undone = f"; undone: {mark.undone_why}" if mark.undone_at is not None else ""
        yield _one(mark.since, "wrong rewards", f"{mark.kind} {mark.target}", mark.why + undone, until=mark.undone_at)


def _weights(report: Report) -> Iterator[IncidentPart]:
    yield from map(_trouble, report.weight_troubles)
    told = {(item.version, item.engine) for item in report.weight_troubles}
    for item in report.publications:
        for load in item.loads:
            # Loads from before tries were recorded.
            if not load.proven and (item.version, load.engine) not in told:
                yield _one(item.published_at, "weights not proven", f"version {item.version}, {load.engine}", load.why)


def _trouble(item: WeightTroublePart) -> IncidentPart:
    last = item.tries[-1]
    return _one(
        item.tries[0].began_at,
        "weight update",
        f"version {item.version}, {item.engine or 'publication'}",
        f"{item.what}; {item.ending}",
        until=last.began_at + (last.seconds or 0.0),
        count=sum(row.ended != RESTARTED for row in item.tries),
    )


def _evaluations(opened: Session, run: str) -> Iterator[IncidentPart]:
    statement = select(ServedEvaluation).where(ServedEvaluation.run == run, col(ServedEvaluation.state).in_(NO_RESULT))
    for row in opened.exec(statement).all():
        yield _one(row.started_at, f"evaluation {row.state}", f"version {row.version}, {row.id}", row.reason)


def _state(report: Report) -> Iterator[IncidentPart]:
    """The run as it stands: that it failed, or that it waits for its environment now."""
    if report.state in (RunState.FAILED, RunState.DEGRADED):
        yield _one(report.started_at + report.seconds, f"run {report.state}", f"step {report.step}", report.reason)


def _one(at: float, what: str, where: str, why: str, *, until: float | None = None, count: int = 1) -> IncidentPart:
    last = at if until is None else until
    return IncidentPart(at=at, until=last, what=what, where=where, count=count, why=why, example="")
