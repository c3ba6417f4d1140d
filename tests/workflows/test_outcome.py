"""The outcome table and the reading of failures, without a server."""

from __future__ import annotations

import pytest
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType
from temporalio.exceptions import RetryState as Retry

from workflows.contracts import Outcome, StopReason, VerifyOutput, derive_seed, parse_policy_label, policy_label
from workflows.outcome import TABLE, Boundary, Rule, judge, needs_verdict, stop_reason_of


def failed(cause: BaseException) -> ActivityError:
    error = ActivityError(
        "activity failed",
        scheduled_event_id=1,
        started_event_id=2,
        identity="",
        activity_type="act",
        activity_id="1",
        retry_state=Retry.TIMEOUT,
    )
    error.__cause__ = cause
    return error


def timeout(kind: TimeoutType, cause: BaseException | None = None) -> TimeoutError:
    error = TimeoutError("timed out", type=kind, last_heartbeat_details=[])
    error.__cause__ = cause
    return error


def test_every_stop_reason_has_one_rule() -> None:
    assert set(TABLE) == set(StopReason)


def test_no_ending_that_the_agent_can_cause_is_without_a_reward() -> None:
    """The model can't escape through a crash."""
    for reason, rule in TABLE.items():
        infra = reason.value.endswith("_lost") or reason is StopReason.UNDETERMINED
        assert (rule in (Rule.INFRA, Rule.UNKNOWN)) is infra


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_decides_where_the_table_says_so(passed: bool) -> None:
    verdict = VerifyOutput(reward=float(passed), passed=passed)
    for reason in filter(needs_verdict, StopReason):
        judgement = judge(reason, verdict, -1)
        assert judgement.reward == float(passed)
        assert judgement.outcome is (Outcome.MODEL_SUCCESS if passed else Outcome.MODEL_FAILURE)


def test_a_missing_verdict_is_never_a_silent_zero() -> None:
    with pytest.raises(ValueError, match="verdict"):
        judge(StopReason.FINISHED, None, 0)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (timeout(TimeoutType.HEARTBEAT), StopReason.SANDBOX_LOST),
        (timeout(TimeoutType.SCHEDULE_TO_START), StopReason.SANDBOX_LOST),
        (timeout(TimeoutType.SCHEDULE_TO_CLOSE), StopReason.SANDBOX_LOST),
        (timeout(TimeoutType.SCHEDULE_TO_CLOSE, ApplicationError("x", type="EngineLost")), StopReason.ENGINE_LOST),
        (timeout(TimeoutType.START_TO_CLOSE), StopReason.UNDETERMINED),
        (ApplicationError("x", type="StorageLost"), StopReason.STORAGE_LOST),
        (ApplicationError("x", type="WorkerLost"), StopReason.SANDBOX_LOST),
        (timeout(TimeoutType.SCHEDULE_TO_CLOSE, ApplicationError("x", type="WorkerLost")), StopReason.SANDBOX_LOST),
        (ApplicationError("x", type="ValueError"), StopReason.UNDETERMINED),
    ],
)
def test_the_cause_chain_names_the_ending(cause: BaseException, reason: StopReason) -> None:
    assert stop_reason_of(failed(cause), Boundary.SANDBOX)[0] is reason


@pytest.mark.parametrize("kind", TimeoutType)
@pytest.mark.parametrize("nested", [True, False])
def test_a_store_that_hangs_is_lost_whichever_bound_ran_out(kind: TimeoutType, nested: bool) -> None:
    found = timeout(kind)
    cause = timeout(TimeoutType.SCHEDULE_TO_CLOSE, found) if nested else found
    assert stop_reason_of(failed(cause), Boundary.STORAGE)[0] is StopReason.STORAGE_LOST


def test_a_policy_label_carries_run_version_and_proof() -> None:
    assert parse_policy_label(policy_label("a:b", 7)) == ("a:b", 7, True)
    assert parse_policy_label(policy_label("a", 7, proven=False)) == ("a", 7, False)
    assert parse_policy_label("default") is None


def test_seeds_depend_on_identifiers_alone() -> None:
    assert derive_seed(1, "g", 2) == derive_seed(1, "g", 2) != derive_seed(1, "g", 3)
