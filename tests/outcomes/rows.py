"""The outcome table of docs as rows to provoke. `AGENT` rows need nothing but what the agent says."""

from __future__ import annotations

from tests.outcomes.worlds import DONE, FAILURE_REWARD, SOLVE, Row, bash
from workflows.contracts import Outcome, StopReason

SUCCESS, FAILURE, INFRA, UNKNOWN = (
    Outcome.MODEL_SUCCESS,
    Outcome.MODEL_FAILURE,
    Outcome.INFRA_FAILURE,
    Outcome.UNKNOWN,
)


def kills(id: str, command: str, why: str) -> Row:
    """An agent that breaks its own sandbox."""
    return Row(
        id,
        [bash(command), DONE],
        StopReason.SANDBOX_KILLED_BY_AGENT,
        FAILURE,
        FAILURE_REWARD,
        why=why,
        evidence={"blame": "agent", "faults of the host": "none"},
    )


def lost(id: str, reason: StopReason, *, says: str = DONE, why: str = "", **changes: object) -> Row:
    return Row(id, [says, DONE], reason, INFRA, None, why=why, **changes)  # type: ignore[arg-type]


TESTS = {
    "setup": "mkdir /work/tests; echo '[ -e /work/out ]' > /work/tests/test.sh; chown -R agent /work/tests",
    "check": "sh /work/tests/test.sh || exit 1",
    "protected": ["/work/tests"],
}
REPORTS = {
    "check": 'for test in a b; do [ -e /work/skip-$test ] || echo "PASSED $test"; done',
    "expected_tests": ["a", "b"],
}

AGENT = [
    Row("finished-passes", [bash(SOLVE), DONE], StopReason.FINISHED, SUCCESS, 1.0),
    Row("finished-fails", [bash("echo pear > out"), DONE], StopReason.FINISHED, FAILURE, 0.0),
    Row("max_turns", [bash(SOLVE), bash("ls")], StopReason.MAX_TURNS, SUCCESS, 1.0, limits={"max_turns": 2}),
    Row(
        "time_budget",
        [bash(f"{SOLVE}; sleep 1.2"), bash("sleep 60")],
        StopReason.TIME_BUDGET,
        FAILURE,
        FAILURE_REWARD,
        limits={"time_budget_s": 2},
        evidence={"blame": "agent"},
    ),
    Row(
        "step-time-out-is-no-ending",
        [bash("sleep 60"), bash(SOLVE), DONE],
        StopReason.FINISHED,
        SUCCESS,
        1.0,
        limits={"step_timeout_s": 1},
    ),
    kills("sandbox_killed_by_agent-its-shell", "kill -9 $$", "killed its own shell"),
    Row(
        "process-1-can-not-be-killed",
        [bash("kill -9 1; kill -TERM 1; kill -9 -1"), bash(SOLVE), DONE],
        StopReason.FINISHED,
        SUCCESS,
        1.0,
    ),
    kills("sandbox_killed_by_agent-full-disk", "cat /dev/zero > big", "its disk is full: /work"),
    kills("sandbox_killed_by_agent-out-of-memory", "x=a; while :; do x=$x$x$x; done", "out of memory"),
    kills("sandbox_killed_by_agent-fork-bomb", "while :; do sleep 1000 & done", "fork bomb"),
    Row(
        "malformed_action", ["Hm.", "Well."], StopReason.MALFORMED_ACTION, FAILURE, FAILURE_REWARD, why="Not understood"
    ),
    Row(
        "verifier_broken_by_answer-crash",
        [bash("touch broken"), DONE],
        StopReason.VERIFIER_BROKEN_BY_ANSWER,
        FAILURE,
        FAILURE_REWARD,
        evidence={"check on this answer": "exit 7", "check on a known-good answer": "exit 0"},
    ),
    Row(
        "verifier_broken_by_answer-hang",
        [bash("mkfifo out"), DONE],
        StopReason.VERIFIER_BROKEN_BY_ANSWER,
        FAILURE,
        FAILURE_REWARD,
        evidence={"check on a known-good answer": "exit 0"},
    ),
    Row(
        "tampered-tests-touched",
        [bash("touch out; echo exit 0 > tests/test.sh"), DONE],
        StopReason.TAMPERED,
        FAILURE,
        FAILURE_REWARD,
        task=TESTS,
        tampered=True,
        why="a protected file is not what it was",
    ),
    Row("untouched-tests-are-no-tampering", [bash("touch out"), DONE], StopReason.FINISHED, SUCCESS, 1.0, task=TESTS),
    Row(
        "tampered-test-missing",
        [bash("touch skip-b"), DONE],
        StopReason.TAMPERED,
        FAILURE,
        FAILURE_REWARD,
        task=REPORTS,
        tampered=True,
        why="not reported: b",
    ),
    lost(
        "verifier_lost",
        StopReason.VERIFIER_LOST,
        task={"check": "exit 2"},
        evidence={"check on a known-good answer": "exit 2"},
    ),
]
"""Rows that the agent alone provokes."""

ENGINE_REFUSES = lost("engine_lost-5xx", StopReason.ENGINE_LOST, why="HTTP 503")
ENGINE_DISOWNED = lost("engine_lost-weights", StopReason.ENGINE_LOST, why="carries 'unproven'")
ENGINE_KILLED = lost("engine_lost-killed", StopReason.ENGINE_LOST, limits={"max_tokens_per_turn": 600})
CONTAINER_REMOVED = lost(
    "sandbox_lost-removed",
    StopReason.SANDBOX_LOST,
    says=bash("sleep 30"),
    why="the container",
    limits={"step_timeout_s": 20},
    evidence={"blame": "host"},
)
CONTAINER_KILLED = lost(
    "sandbox_lost-killed-from-outside",
    StopReason.SANDBOX_LOST,
    says=bash("sleep 30"),
    why="killed by a request to the daemon",
    limits={"step_timeout_s": 20},
    evidence={"blame": "host"},
)
DAEMON_GONE = lost("sandbox_lost-daemon-gone", StopReason.SANDBOX_LOST, why="no answer from unix://")
STORE_KILLED = lost("storage_lost-object-store", StopReason.STORAGE_LOST, why="put runs/outcomes")
DATABASE_LOCKED = lost(
    "storage_lost-database", StopReason.STORAGE_LOST, why="database is locked", recorded=False, says=bash(SOLVE)
)
DATABASE_HANGS = lost(
    "storage_lost-database-hangs", StopReason.STORAGE_LOST, why="past its bound", recorded=False, says=bash(SOLVE)
)
CONTRADICTORY = Row(
    "undetermined-contradictory",
    [bash("(sleep 1; x=a; while :; do x=$x$x$x; done) >&- 2>&- & echo begun"), bash("exec sleep 30")],
    StopReason.UNDETERMINED,
    UNKNOWN,
    None,
    limits={"step_timeout_s": 20, "time_budget_s": 60},
    why="killed by a request to the daemon; so nobody is blamed",
    evidence={"blame": "unknown"},
)
OVERDUE = Row(
    "undetermined-over-its-bound",
    [DONE],
    StopReason.UNDETERMINED,
    UNKNOWN,
    None,
    task={"check": "sleep 12"},
    why="ran past its bound on a living worker",
)
OTHERS_WERE_ENOUGH = Row(
    "surplus",
    [bash("sleep 30"), DONE],
    StopReason.SURPLUS,
    Outcome.SURPLUS,
    None,
    limits={"step_timeout_s": 20},
    why="others were enough",
)
MAX_TOKENS = Row(
    "max_tokens",
    [],
    StopReason.MAX_TOKENS,
    FAILURE,
    0.0,
    limits={"max_tokens_per_turn": 8, "context_length": 1000},
    why="cut at its token budget",
)
CONTEXT_FULL = Row("context_full", [], StopReason.CONTEXT_FULL, FAILURE, 0.0, why="does not fit")
OTHERS = [
    MAX_TOKENS,
    CONTEXT_FULL,
    ENGINE_REFUSES,
    ENGINE_DISOWNED,
    ENGINE_KILLED,
    CONTAINER_REMOVED,
    CONTAINER_KILLED,
    DAEMON_GONE,
    STORE_KILLED,
    DATABASE_LOCKED,
    DATABASE_HANGS,
    OTHERS_WERE_ENOUGH,
    CONTRADICTORY,
    OVERDUE,
]
"""Rows for which somebody meddles with a service."""
ROWS = [*AGENT, *OTHERS]
