"""Numeric alignment: whether trainer and engine agree on tokens of the same weights, and what is corrected."""

from __future__ import annotations

from statistics import fmean

from storage.report import words
from storage.report.limits import Limits
from storage.report.model import Report
from storage.report.parts import QuestionPart
from storage.report.readiness.answer import NO_UPDATE, SHOWN_ROWS, Answer
from storage.report.readiness.by_step import at, values, worst
from workflows.config import RunConfig
from workflows.contracts import Correction


def numerics(report: Report, config: RunConfig, limits: Limits) -> QuestionPart:
    """The answer to the third question."""
    question = "Do trainer and engine compute the same policy?"
    answer = Answer("numeric alignment", question, "numerics", limits.numerics)
    mean, largest = values(report, "mismatch_kl/mean"), values(report, "mismatch_kl/max")
    far = values(report, "mismatch_abs/far_share")
    cut, masked = values(report, "off_policy/truncated_share"), values(report, "off_policy/masked_share")
    touched = {step: cut.get(step, 0.0) + masked.get(step, 0.0) for step in cut.keys() | masked.keys()}
    if report.state == "failed" and "mismatch_kl" in report.reason:
        answer.fault(f"the run was stopped: {report.reason}")
    answer.shown("mismatch_kl, mean", fmean(mean.values()) if mean else None, words.small)
    answer.at_most("mismatch_kl, worst batch", worst(mean), words.small, "mismatch_kl", because=at(mean))
    answer.shown("mismatch_kl, worst token", worst(largest), words.small)
    answer.at_most("tokens over 0.1 nats apart, worst batch", worst(far), words.share, "far_share", because=at(far))
    training = config.training
    answer.text("correction in force", _correction(config))
    answer.at_most(
        "tokens that it cut or masked, worst batch",
        worst(touched),
        words.share,
        "corrected_share",
        because=at(touched),
    )
    answer.text("the run stops at", f"mismatch_kl {words.small(training.max_mismatch_kl)}")
    answer.detail(
        "The worst batches",
        ("step", "mismatch_kl", "worst token", "over 0.1 nats", "truncated", "masked"),
        [
            (
                str(step),
                words.small(mean[step]),
                words.small(largest.get(step)),
                words.share(far.get(step)),
                words.share(cut.get(step)),
                words.share(masked.get(step)),
            )
            for step in sorted(mean, key=lambda step: -mean[step])[:SHOWN_ROWS]
        ],
    )
    missing = (
        "no batch had tokens of the weights that the trainer held, so numerics can't be told from staleness: run"
        f" `ratchet align {report.model}`"
    )
    return answer.part(
        f"mismatch_kl is at most {words.small(worst(mean))} over {len(mean)} batches",
        unmeasured="" if mean else missing if report.steps else NO_UPDATE,
    )


def _correction(config: RunConfig) -> str:
    training = config.training
    match training.correction:
        case Correction.NONE:
            return "none"
        case Correction.MASKED:
            return f"masked outside of {training.importance_low:g} to {training.importance_high:g}"
        case kind:
            return f"{kind.value}, capped at {training.importance_cap:g}"
