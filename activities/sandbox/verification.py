"""The verdict on an attempt: the task's check in its sandbox, and whose fault it is when the check breaks.

Owns the rule: exit 0 is reward 1, exit 1 is reward 0, anything else is a broken verifier. A broken one is run once
more; if it breaks again it is asked about a known-good answer in a fresh sandbox. Only this answer breaks it: the
model's failure, so that crashing the verifier never pays. Called by `SandboxActivities.verify`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from activities.sandbox.channel import Operation, Result
from activities.sandbox.evidence import broken_by_agent
from tasksets.base import Task
from workflows.errors import SandboxError, VerifierBrokenByAnswer, VerifierError

CHECK_S = 15.0
ORACLE_S = 15.0
Run = Callable[[Operation], Awaitable[Result]]
"""Runs an operation in one sandbox."""


def setup_operation(task: Task) -> Operation:
    return Operation(op_id="setup", command=task.setup, timeout_s=30.0, root=True)


def check_operation(task: Task, answer: str, number: int) -> Operation:
    """The check as root: trusted PATH, ANSWER in its environment. `number` tells the second run from the first."""
    return Operation(op_id=f"check-{number}", command=task.check, timeout_s=CHECK_S, root=True, env={"ANSWER": answer})


async def set_up(task: Task, run: Run) -> None:
    """Run the task's setup. Raises SandboxError (final: the same sandbox would give the same again)."""
    result = await run(setup_operation(task))
    if result.exit_code != 0:
        said = result.tail or result.head
        raise SandboxError(
            f"the setup of {task.id} failed: {describe(result)}: {said.decode(errors='replace')[-300:].strip()}",
            retryable=False,
        )


async def judge(
    task: Task, answer: str, run: Run, known_good: Callable[[], AbstractAsyncContextManager[Run]]
) -> tuple[bool, str]:
    """(passed, detail) of an attempt whose processes are dead already. `known_good` opens a fresh sandbox.

    Raises VerifierBrokenByAnswer, VerifierError (final), or SandboxError."""
    for number in (1, 2):
        result = await run(check_operation(task, answer, number))
        if result.exit_code in (0, 1):
            return result.exit_code == 0, f"check: {describe(result)}"
    broken = f"the check of {task.id}: {describe(result)}"
    async with known_good() as fresh:
        await set_up(task, fresh)
        for turn, command in enumerate(task.oracle):
            await fresh(Operation(op_id=f"oracle-{turn}", command=command, timeout_s=ORACLE_S))
        proof = await fresh(check_operation(task, task.oracle_answer, 1))
    if proof.exit_code == 0:
        raise VerifierBrokenByAnswer(f"{broken}; a known-good answer passes")
    raise VerifierError(f"{broken}; on a known-good answer: {describe(proof)}", retryable=False)


def describe(result: Result) -> str:
    """How an operation ended, in words."""
    if result.timed_out:
        return f"timed out after {result.seconds:.1f} s"
    if result.signal is not None:
        return f"ended by signal {result.signal}"
    if result.exit_code is None:
        return broken_by_agent(result) or "did not end"
    return f"exit {result.exit_code}"
