"""What an ending means for training: the one table, and the one place that reads failures.

Pure. Called by the Episode workflow. `stop_reason_of` names the ending that a failed activity stands for by walking its
cause chain; `judge` turns (stop reason, verdict) into an outcome and a reward. The default for anything not understood
is `undetermined`, never the model's fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    ServerError,
    TimeoutError,
    TimeoutType,
)

from workflows.contracts import FailureType, Outcome, StopReason, VerifyOutput


class Boundary(StrEnum):
    """The service that an activity crosses to; a lost worker counts as the loss of it."""

    ENGINE = "engine"
    SANDBOX = "sandbox"
    VERIFIER = "verifier"
    STORAGE = "storage"


class Rule(StrEnum):
    """How a stop reason becomes an outcome."""

    BY_VERDICT = "by verdict"
    FAILURE = "model failure with the failure reward"
    INFRA = "infrastructure"
    UNKNOWN = "unknown"
    SURPLUS = "ended by us, others being enough"


TABLE: dict[StopReason, Rule] = {
    StopReason.FINISHED: Rule.BY_VERDICT,
    StopReason.MAX_TURNS: Rule.BY_VERDICT,
    StopReason.MAX_TOKENS: Rule.BY_VERDICT,
    StopReason.CONTEXT_FULL: Rule.BY_VERDICT,
    StopReason.TIME_BUDGET: Rule.FAILURE,
    StopReason.SANDBOX_KILLED_BY_AGENT: Rule.FAILURE,
    StopReason.MALFORMED_ACTION: Rule.FAILURE,
    StopReason.VERIFIER_BROKEN_BY_ANSWER: Rule.FAILURE,
    StopReason.TAMPERED: Rule.FAILURE,
    StopReason.ENGINE_LOST: Rule.INFRA,
    StopReason.SANDBOX_LOST: Rule.INFRA,
    StopReason.STORAGE_LOST: Rule.INFRA,
    StopReason.VERIFIER_LOST: Rule.INFRA,
    StopReason.UNDETERMINED: Rule.UNKNOWN,
    StopReason.SURPLUS: Rule.SURPLUS,
}

_BY_FAILURE_TYPE: dict[str, StopReason] = {
    FailureType.ENGINE: StopReason.ENGINE_LOST,
    FailureType.SANDBOX: StopReason.SANDBOX_LOST,
    FailureType.STORAGE: StopReason.STORAGE_LOST,
    FailureType.VERIFIER: StopReason.VERIFIER_LOST,
    FailureType.VERIFIER_BROKEN: StopReason.VERIFIER_BROKEN_BY_ANSWER,
    FailureType.UNDETERMINED: StopReason.UNDETERMINED,
}

_BY_BOUNDARY: dict[Boundary, StopReason] = {
    Boundary.ENGINE: StopReason.ENGINE_LOST,
    Boundary.SANDBOX: StopReason.SANDBOX_LOST,
    Boundary.VERIFIER: StopReason.SANDBOX_LOST,
    Boundary.STORAGE: StopReason.STORAGE_LOST,
}


@dataclass(frozen=True)
class Judgement:
    outcome: Outcome
    reward: float | None


def needs_verdict(stop_reason: StopReason) -> bool:
    """Whether the verifier is asked after this ending."""
    return TABLE[stop_reason] is Rule.BY_VERDICT


def judge(stop_reason: StopReason, verdict: VerifyOutput | None, failure_reward: float) -> Judgement:
    """Outcome and reward of an ending. Raises ValueError where the table asks for a verdict and there is none."""
    match TABLE[stop_reason]:
        case Rule.BY_VERDICT:
            if verdict is None:
                raise ValueError(f"{stop_reason} is judged by the verdict, and there is none")
            passed = Outcome.MODEL_SUCCESS if verdict.passed else Outcome.MODEL_FAILURE
            return Judgement(passed, verdict.reward)
        case Rule.FAILURE:
            return Judgement(Outcome.MODEL_FAILURE, failure_reward)
        case Rule.INFRA:
            return Judgement(Outcome.INFRA_FAILURE, None)
        case Rule.UNKNOWN:
            return Judgement(Outcome.UNKNOWN, None)
        case Rule.SURPLUS:
            return Judgement(Outcome.SURPLUS, None)


def stop_reason_of(error: BaseException, boundary: Boundary) -> tuple[StopReason, str]:
    """(ending, one sentence) for a failed call across `boundary`. The innermost failure that says anything decides."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ApplicationError) and cause.type == FailureType.WORKER:
            return _BY_BOUNDARY[boundary], f"the worker was lost ({cause.message})"
        if isinstance(cause, ApplicationError):
            return _BY_FAILURE_TYPE.get(cause.type or "", StopReason.UNDETERMINED), f"{cause.type}: {cause.message}"
        if isinstance(cause, TimeoutError):
            if cause.type in (TimeoutType.HEARTBEAT, TimeoutType.SCHEDULE_TO_START):
                return _BY_BOUNDARY[boundary], f"the worker was lost ({_name(cause.type)} time-out)"
            if cause.type is TimeoutType.SCHEDULE_TO_CLOSE and cause.__cause__ is None:
                return _BY_BOUNDARY[boundary], "no worker finished it in time"
            if cause.type is TimeoutType.START_TO_CLOSE and cause.__cause__ is None:
                # Nothing of the agent's crosses to storage: a store that hangs is nobody else's doing.
                overdue = StopReason.STORAGE_LOST if boundary is Boundary.STORAGE else StopReason.UNDETERMINED
                return overdue, "it ran past its bound on a living worker"
        # The server's own is a wrapper too: between attempts it keeps four kilobytes of a failure, cut, as its cause.
        elif not isinstance(cause, ActivityError | ChildWorkflowError | ServerError):
            return StopReason.UNDETERMINED, f"{type(cause).__name__}: {cause}"
        cause = cause.__cause__
    return StopReason.UNDETERMINED, f"{type(error).__name__}: {error}"


def evidence_of(error: BaseException) -> dict[str, str]:
    """What was measured to name a failed call's failure; empty where nothing had to be."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ApplicationError):
        cause = cause.__cause__
    found = cause.details[0] if cause is not None and cause.details else {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _name(kind: TimeoutType | None) -> str:
    return kind.name.lower().replace("_", " ") if kind is not None else "unknown"
