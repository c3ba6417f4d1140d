"""The end of an attempt as an exception: raised where it is noticed, caught by the Episode workflow alone."""

from __future__ import annotations

from temporalio.exceptions import ActivityError, is_cancelled_exception

from workflows.contracts import StopReason
from workflows.outcome import Boundary, evidence_of, stop_reason_of


class Ended(Exception):
    """The attempt is over: internal, never crosses the workflow. `evidence` is what was measured to name its end."""

    def __init__(self, reason: StopReason, why: str = "", evidence: dict[str, str] | None = None) -> None:
        super().__init__(reason)
        self.reason, self.why, self.evidence = reason, why, evidence or {}


def ended_by(error: ActivityError, boundary: Boundary) -> Ended:
    """The ending that a failed call means. Raises the error itself when it is our own cancellation."""
    if is_cancelled_exception(error):
        raise error
    return Ended(*stop_reason_of(error, boundary), evidence_of(error))
