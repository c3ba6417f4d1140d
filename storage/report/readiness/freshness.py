"""Policy freshness: how old the tokens of the batches are, and what was dropped for its age."""

from __future__ import annotations

from statistics import fmean

from sqlmodel import Session

from storage import health
from storage.report import words
from storage.report.limits import Limits
from storage.report.model import Report
from storage.report.parts import QuestionPart
from storage.report.readiness.answer import NO_UPDATE, SHOWN_ROWS, Answer
from storage.report.readiness.by_step import at, values, worst
from workflows.config import RunConfig

STALE = ("too_stale", "beyond_divergence")


def freshness(opened: Session, report: Report, config: RunConfig, limits: Limits) -> QuestionPart:
    """The answer to the second question."""
    answer = Answer("policy freshness", "Is the data fresh?", "freshness", limits.freshness)
    ages, oldest = values(report, "off_policy/steps"), values(report, "off_policy/steps_max")
    divergence, size = values(report, "off_policy/divergence"), values(report, "off_policy/effective_sample_size")
    given = limits.freshness.off_policy_steps
    answer.shown("age of a token in versions, mean", fmean(ages.values()) if ages else None, words.small)
    for key, name in (("in_flight", "of it while it was made"), ("in_pool", "of it while it waited")):
        part = values(report, f"off_policy/{key}")
        answer.shown(name, fmean(part.values()) if part else None, words.small)
    answer.at_most(
        "oldest token",
        worst(oldest),
        words.count,
        "off_policy_steps",
        because=at(oldest),
        limit=float(report.max_off_policy_steps or 0) if given < 0 else None,
    )
    answer.at_most("divergence, worst batch", worst(divergence), words.small, "divergence", because=at(divergence))
    answer.at_least(
        "effective sample size, worst batch",
        min(size.values(), default=None),
        words.share,
        "effective_sample_size",
        because=at(size, lowest=True),
    )
    dropped, closed = report.groups.dropped, report.groups.closed
    stale = sum(dropped.get(reason, 0) for reason in STALE)
    answer.at_most(
        "groups dropped as stale",
        stale / closed if closed else None,
        words.share,
        "dropped_share",
        because=", ".join(f"{dropped[reason]} {words.plain(reason)}" for reason in STALE if dropped.get(reason)),
    )
    answer.text(
        "drift limit",
        f"{config.training.max_divergence:g} nats, then {config.training.on_stale.value}"
        + (f"; at most {report.max_off_policy_steps} versions" if report.mode == "async" else "; sync: no lag"),
    )
    versions = health.batch_versions(opened, run=report.run)
    answer.detail(
        "Versions of the last batches",
        ("step", "versions", "age", "oldest", "divergence", "effective sample"),
        [
            (
                str(step.step),
                words.versions(*versions.get(step.step, (None, None))),
                words.small(ages.get(step.step)),
                words.count(oldest.get(step.step)),
                words.small(divergence.get(step.step)),
                words.share(size.get(step.step)),
            )
            for step in report.steps[-SHOWN_ROWS:]
        ],
    )
    answer.detail(
        "Groups that trained nothing",
        ("reason", "groups"),
        [(words.plain(reason), str(count)) for reason, count in dropped.items()],
    )
    summary = f"tokens are {words.small(fmean(ages.values()) if ages else None)} versions old, divergence at most "
    return answer.part(summary + words.small(worst(divergence)), unmeasured="" if divergence else NO_UPDATE)
