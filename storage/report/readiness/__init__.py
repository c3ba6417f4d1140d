"""The six questions before a run is scaled, answered from its rows against the limits of limits.toml.

One module per question; each says what was measured, what decides, and who is behind it. Called by `build_report`.
"""

from __future__ import annotations

from sqlmodel import Session

from storage.report.limits import Limits
from storage.report.model import Report
from storage.report.parts import QuestionPart
from storage.report.readiness.batches import batches
from storage.report.readiness.environment import environment
from storage.report.readiness.evaluation import evaluation
from storage.report.readiness.freshness import freshness
from storage.report.readiness.numerics import numerics
from storage.report.readiness.publication import publication
from workflows.config import RunConfig


def readiness(opened: Session, report: Report, config: RunConfig, limits: Limits) -> list[QuestionPart]:
    """The answers, in the order of the questions."""
    return [
        batches(opened, report, limits),
        freshness(opened, report, config, limits),
        numerics(report, config, limits),
        environment(opened, report, limits),
        publication(opened, report, limits),
        evaluation(report, limits),
    ]
