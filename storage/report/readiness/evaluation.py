"""Evaluation: what was measured on held-out tasks, and whether that is what will be served."""

from __future__ import annotations

from storage.report import words
from storage.report.limits import Limits
from storage.report.model import Report
from storage.report.parts import QuestionPart
from storage.report.readiness.answer import Answer
from storage.report.readiness.by_step import worst


def evaluation(report: Report, limits: Limits) -> QuestionPart:
    """The answer to the sixth question. Results are not stored with what made them, so it can't be `ready`."""
    answer = Answer("evaluation", "Does evaluation measure what will be served?", "evaluation", limits.evaluation)
    points = report.evaluation.versions
    shares = {point.version: point.excluded / max(1, point.episodes + point.excluded) for point in points}
    answer.shown("evaluations", float(len(points)), words.count)
    answer.shown("held-out reward, first", report.evaluation.first, words.reward)
    answer.shown("held-out reward, last", report.evaluation.last, words.reward)
    since = float(report.policy_version - points[-1].version) if points else None
    answer.shown("versions since the last one", since, words.count)
    most = f"version {max(shares, key=lambda version: shares[version])}" if shares else ""
    answer.at_most("episodes left out, worst", worst(shares), words.share, "excluded_share", because=most)
    missing = (
        "results are stored without the engine, dtype, quantization, kernels and sampling that made them: before you"
        " serve, evaluate the version with the settings that will serve it"
        if points
        else "there is no evaluation: set evaluation.tasks in run.json"
    )
    return answer.part("", unmeasured=missing)
