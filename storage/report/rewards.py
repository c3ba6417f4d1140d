"""Rewards that were wrong and rewards that look wrong: the part of the report on them, which `ratchet quarantine` and
`ratchet audit` print alone."""

from __future__ import annotations

import shlex

from sqlmodel import Session

from storage import audit, quarantine
from storage.affected import Affected, affected
from storage.audit import Finding, Suspicion
from storage.report.limits import Limits
from storage.report.parts import Part
from storage.tables import QuarantineMark

FEW = 4
"""Attempts that a ready-made command names one by one; beyond it names their task."""
OF_THE_TASK = (Suspicion.TAMPERED, Suspicion.FLAKY_VERIFIER)
"""Suspicions that fall on every reward of the task, whoever was caught."""


class MarkPart(Part):
    """An operator's mark on a task of the run or on one attempt. It holds while `undone_at` is None."""

    run: str
    kind: str
    """`task` or `episode`."""
    target: str
    why: str
    by: str
    since: float
    undone_at: float | None
    undone_by: str
    undone_why: str


class TouchedBatchPart(Part):
    """A batch with episodes in quarantine, archived successes too. Tokens are sampled ones."""

    batch: str
    step: int
    state: str
    """`reserved` is cut and not trained yet: it will be trained as it was cut."""
    episodes: int
    of_episodes: int
    tokens: int
    of_tokens: int
    version: int | None
    """That it made, once published."""


class DescendantsPart(Part):
    """Versions of a run whose weights go back to a touched batch."""

    run: str
    versions: list[int]


class AffectedPart(Part):
    """What trained on the episodes in question, as storage/affected.py counts it. Shares are None without a whole."""

    run: str
    episodes: int
    of_episodes: int
    episode_share: float | None
    trained: int
    of_trained: int
    tokens: int
    of_tokens: int
    token_share: float | None
    touched_batches: int
    of_batches: int
    batch_share: float | None
    batches: list[TouchedBatchPart]
    waiting: int
    """Valid episodes that no batch had taken; none takes them any more."""
    evaluations: list[int]
    """Versions whose evaluation counted one; its figures are as they were."""
    versions: list[DescendantsPart]


class FindingPart(Part):
    """A reason to look into rewards, as storage/audit.py defines it; `command` puts what is behind it in quarantine."""

    suspicion: str
    task: str
    episodes: list[str]
    of: int
    figures: dict[str, float]
    words: str
    detail: str
    command: str


class RewardsPart(Part):
    """`affected`: of all marks that hold together."""

    marks: list[MarkPart]
    """Those that were undone too, oldest first."""
    affected: AffectedPart
    findings: list[FindingPart]


def rewards_part(opened: Session, run: str, limits: Limits) -> RewardsPart:
    return RewardsPart(
        marks=[mark_part(mark) for mark in quarantine.marks(opened, run=run)],
        affected=affected_part(affected(opened, run=run, which=quarantine.in_quarantine())),
        findings=findings(opened, run, limits),
    )


def mark_part(mark: QuarantineMark) -> MarkPart:
    return MarkPart(**mark.model_dump(include=set(MarkPart.model_fields)))


def affected_part(item: Affected) -> AffectedPart:
    return AffectedPart(
        **{name: getattr(item, name) for name in ("run", "episodes", "of_episodes", "trained", "of_trained")},
        **{name: getattr(item, name) for name in ("tokens", "of_tokens", "of_batches", "waiting", "evaluations")},
        episode_share=_share(item.episodes, item.of_episodes),
        token_share=_share(item.tokens, item.of_tokens),
        touched_batches=item.touched,
        batch_share=_share(item.touched, item.of_batches),
        batches=[TouchedBatchPart(**batch._asdict()) for batch in item.batches],
        versions=[DescendantsPart(**versions._asdict()) for versions in item.versions],
    )


def findings(opened: Session, run: str, limits: Limits) -> list[FindingPart]:
    """What the audits find."""
    found = audit.audit(opened, run=run, thresholds=limits.audit)
    return [FindingPart(**item._asdict(), command=_command(run, item)) for item in found]


def _share(some: int, of: int) -> float | None:
    return some / of if of else None


def _command(run: str, finding: Finding) -> str:
    whole = finding.suspicion in OF_THE_TASK or len(finding.episodes) > FEW
    named = [word for attempt in finding.episodes for word in ("--episode", attempt)]
    target = ["--task", finding.task, "--run", run] if whole else named
    why = f"audit, {finding.suspicion.replace('_', ' ')}: {finding.words}"
    return shlex.join(["ratchet", "quarantine", *target, "--why", why])
