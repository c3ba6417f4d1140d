"""Batch readiness: how long the trainer waits for a batch, and for whom."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from sqlmodel import Session

from storage import health
from storage.report import words
from storage.report.limits import Limits
from storage.report.model import TIME_PARTS, Report, StepPart
from storage.report.parts import QuestionPart
from storage.report.readiness.answer import NO_UPDATE, SHOWN_ROWS, Answer


def batches(opened: Session, report: Report, limits: Limits) -> QuestionPart:
    """The answer to the first question."""
    answer = Answer("batch readiness", "Are batches ready in time?", "batch", limits.batch)
    means, later = report.summary, [step for step in report.steps[1:] or report.steps if _wait(step) is not None]
    waits = [_wait(step) or 0.0 for step in later]
    middle = median(waits) if waits else None
    shares = [step.tail.seconds / wait for step, wait in zip(later, waits, strict=True) if step.tail and wait > 0]
    slow = [step for step in later if middle is not None and _is_slow(step, middle, limits)]
    tasks = health.tasks_of(opened, attempts=[step.tail.attempt for step in later if step.tail])
    void = len(report.void_batches)
    answer.at_most(
        "time to trainable batch, median", middle, words.seconds, "time_to_batch_s", because=_longest(report)
    )
    tail = median(shares) if shares else None
    answer.at_most(
        "of it for the last 5 %", tail, words.share, "tail_share", because=_stragglers(later, tasks) if shares else ""
    )
    answer.at_most(
        "slow steps",
        float(len(slow)) if waits else None,
        words.count,
        "slow_steps",
        because=_stragglers(slow, tasks),
    )
    answer.shown("slowest step", max(waits, default=None), words.seconds)
    answer.at_most("short groups of a batch", means.short_share, words.share, "short_share")
    every = void + len(report.steps)
    answer.at_most(
        "batches that taught nothing",
        void / every if every else None,
        words.share,
        "void_share",
        because="; ".join(dict.fromkeys(item.reason for item in report.void_batches)),
    )
    parts = sorted(means.time_parts_s.items(), key=lambda item: -item[1])
    answer.detail(
        "What the time to a batch is made of, means",
        ("part", "seconds"),
        [(words.plain(name), words.bare_seconds(value)) for name, value in parts if value],
    )
    answer.detail(
        "Who came last",
        ("step", "seconds", "last 5 %", "group", "attempt", "task", "mostly"),
        [_straggler(step, tasks) for step in sorted(later, key=_tail_s, reverse=True)[:SHOWN_ROWS] if step.tail],
    )
    summary = f"a batch is complete after {words.seconds(middle)}, {words.share(tail)} of it for the last 5 %"
    return answer.part(summary, unmeasured="" if waits else NO_UPDATE)


def _wait(step: StepPart) -> float | None:
    return step.time.get("to_trainable_batch")


def _tail_s(step: StepPart) -> float:
    return step.tail.seconds if step.tail else 0.0


def _is_slow(step: StepPart, middle: float, limits: Limits) -> bool:
    wait = _wait(step) or 0.0
    return wait > limits.batch.slow_step_ratio * middle and wait > middle + limits.batch.slow_step_s


def _longest(report: Report) -> str:
    parts = report.summary.time_parts_s
    return f"most of it is {words.plain(max(parts, key=lambda name: parts[name]))}" if parts else ""


def _stragglers(steps: Iterable[StepPart], tasks: dict[str, str]) -> str:
    """The worst of them, with the group and the attempt that they waited for."""
    worst = sorted(steps, key=_tail_s, reverse=True)[:3]
    return "; ".join(
        f"step {step.step} took {words.seconds(_wait(step))} and waited for {step.tail.attempt}"
        f" ({tasks.get(step.tail.attempt, 'unknown task')}), mostly {_mostly(step.tail.parts)}"
        if step.tail
        else f"step {step.step} took {words.seconds(_wait(step))}"
        for step in worst
    )


def _mostly(parts: dict[str, float]) -> str:
    """The part on which an attempt spent most."""
    name = max(TIME_PARTS, key=lambda part: parts.get(part, 0.0))
    return f"{words.plain(name)} ({words.seconds(parts.get(name, 0.0))})"


def _straggler(step: StepPart, tasks: dict[str, str]) -> list[str]:
    assert step.tail is not None
    group, attempt = step.tail.group.rpartition("/")[2], step.tail.attempt
    seconds = (words.bare_seconds(_wait(step)), words.bare_seconds(step.tail.seconds))
    return [str(step.step), *seconds, group, attempt, tasks.get(attempt, words.NONE), _mostly(step.tail.parts)]
