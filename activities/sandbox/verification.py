"""The verdict on an attempt: the task's check in its sandbox, and whose fault it is when the check breaks.

Owns the rule: exit 0 is reward 1, exit 1 is reward 0, anything else is a broken verifier. A broken one is run once
more; if it breaks again it is asked about a known-good answer in a fresh sandbox. Only this answer breaks it: the
model's failure, so that crashing the verifier never pays. Before all that: an agent that touched protected files, or
whose run left out an expected test, tampered. Whatever speaks against the agent is looked into first, so that the
host's doing never does. Called by `SandboxActivities`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from activities.sandbox.channel import Operation, Result
from activities.sandbox.evidence import broken_by_agent
from activities.sandbox.tampering import digest_operation, is_digest, missing, touched
from tasksets.base import Task
from workflows.errors import SandboxError, VerifierBrokenByAnswer, VerifierError

SETUP_S = 30.0
CHECK_S = 15.0
ORACLE_S = 15.0
Run = Callable[[Operation], Awaitable[Result]]
"""Runs an operation in one sandbox."""
Look = Callable[[Operation, Result], Awaitable[dict[str, str]]]
"""Finds out whose doing a result is: evidence where it is the agent's or needs no looking into; raises SandboxError or
Undetermined where it is not the agent's."""


class ServiceFailed(Exception):
    """After the agent a service of the task is not what a check could ask: it does not pass its health check, or its
    state can't be read. Its container is there. Internal: to a verdict it is what a broken verifier is."""

    def __init__(self, words: str, evidence: dict[str, str]) -> None:
        super().__init__(words)
        self.evidence = evidence


@dataclass(frozen=True)
class Verdict:
    passed: bool
    detail: str
    tampered: bool = False
    partial: float | None = None
    """What the answer is worth where its format knows more than right and wrong."""
    seconds: float = 0.0
    """Of the verifier itself."""
    evidence: dict[str, str] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        return self.partial if self.partial is not None else float(self.passed)


def setup_operation(task: Task) -> Operation:
    return Operation(op_id="setup", command=task.setup, timeout_s=SETUP_S, root=True)


CHECK = "check-"


def check_operation(task: Task, answer: str, number: int) -> Operation:
    """The check as root: trusted PATH, ANSWER in its environment. `number` tells the second run from the first."""
    return Operation(
        op_id=f"{CHECK}{number}",
        command=task.check,
        timeout_s=CHECK_S,
        root=True,
        env={"ANSWER": answer},
        # A test that is cut out of the output would count as left out.
        cap_bytes=1 << 20 if task.expected_tests else 1 << 16,
    )


def is_check(op: Operation) -> bool:
    return op.op_id.startswith(CHECK)


async def set_up(task: Task, run: Run) -> None:
    """Run the task's setup, and note what is protected. Raises SandboxError (final: the same sandbox would give the
    same again)."""
    await run_setup(task, run)
    await note_protected(task, run)


async def run_setup(task: Task, run: Run) -> None:
    """Raises SandboxError (final: the same sandbox would give the same again)."""
    check_setup(task, await run(setup_operation(task)))


def check_setup(task: Task, result: Result) -> None:
    """Raises as `run_setup` for a result of the setup that is not what it should be."""
    if result.exit_code != 0:
        said = result.tail or result.head
        raise SandboxError(
            f"the setup of {task.id} failed: {describe(result)}: {said.decode(errors='replace')[-300:].strip()}",
            retryable=False,
        )


async def note_protected(task: Task, run: Run) -> None:
    """Note in the sandbox's journal what the protected files are before the agent. Raises SandboxError (final)."""
    if task.protected:
        noted = await run(digest_operation(task, when="before"))
        if not is_digest(noted):
            raise SandboxError(f"no digest of the protected files of {task.id}: {describe(noted)}", retryable=False)


async def at_face_value(_: Operation, __: Result) -> dict[str, str]:
    """The `Look` of those who have no inquest."""
    return {}


async def judge(
    task: Task,
    answer: str,
    run: Run,
    known_good: Callable[[], AbstractAsyncContextManager[Run]],
    look: Look = at_face_value,
    *,
    first: int = 1,
) -> Verdict:
    """The verdict on an attempt whose processes are dead already. `known_good` opens a fresh sandbox; one that was
    prepared as the attempt's own was shows what is wrong with the preparation. `first` numbers the check: under a
    number that was used the journal gives its result again.

    Raises VerifierBrokenByAnswer, VerifierError, SandboxError, or what `look` raises."""
    changed, broken = await _changed(task, run, look)
    if broken is None:
        found = await _checked(task, answer, run, look, changed, first)
        if isinstance(found, Verdict):
            return found
        broken = found
    if changed:
        return Verdict(False, f"{changed}; {broken.words}", True)
    async with known_good() as fresh:
        # Once: of a prepared sandbox the journal knows it.
        await set_up(task, fresh)
        for turn, command in enumerate(task.oracle):
            await fresh(Operation(op_id=f"oracle-{turn}", command=command, timeout_s=ORACLE_S))
        try:
            proof = await fresh(check_operation(task, task.oracle_answer, 1))
        except ServiceFailed as failed:
            words, evidence = f"{task.id}: {broken.words}; on a known-good answer: {failed}", broken.evidence
            raise VerifierError(words, retryable=False, evidence=evidence | failed.evidence) from failed
    words = f"{task.id}: {broken.words}"
    evidence = broken.evidence | {"check on a known-good answer": describe(proof)}
    if proof.exit_code == 0:
        raise VerifierBrokenByAnswer(f"{words}; a known-good answer passes", evidence=evidence)
    raise VerifierError(f"{words}; on a known-good answer: {describe(proof)}", retryable=False, evidence=evidence)


@dataclass(frozen=True)
class _Broken:
    """What of the verifier gave no answer on a fit host, in words."""

    words: str
    evidence: dict[str, str]


async def _checked(task: Task, answer: str, run: Run, look: Look, changed: str, first: int) -> Verdict | _Broken:
    """Run the check, once more where it breaks. A result that is no pass is looked into before it counts."""
    broken: list[tuple[Operation, Result]] = []
    for number in (first, first + 1):
        op = check_operation(task, answer, number)
        try:
            result = await run(op)
        except ServiceFailed as failed:
            return _Broken(str(failed), failed.evidence)
        if result.exit_code in (0, 1):
            absent = missing(task, result)
            if result.exit_code == 1 or absent:
                await look(op, result)
            said = [changed, f"not reported: {', '.join(absent)}"[:200] if absent else "", f"check: {describe(result)}"]
            tampered = bool(changed or absent)
            passed = result.exit_code == 0 and not tampered
            return Verdict(passed, "; ".join(filter(None, said)), tampered, seconds=result.seconds)
        broken.append((op, result))
    evidence = await _looked(look, broken)
    return _Broken(f"check: {describe(result)}", evidence | {"check on this answer": describe(result)})


async def _changed(task: Task, run: Run, look: Look) -> tuple[str, _Broken | None]:
    """What of the verifier was tampered with, empty where nothing was; and what kept us from knowing. The journal
    answers for the time before."""
    if not task.protected:
        return "", None
    before = await run(digest_operation(task, when="before"))
    broken: list[tuple[Operation, Result]] = []
    for when in ("after", "after-again"):
        op = digest_operation(task, when=when)
        after = await run(op)
        if is_digest(after):
            return touched(before, after), None
        broken.append((op, after))
    evidence = await _looked(look, broken)
    words = f"digest of the protected files: {describe(after)}"
    return "", _Broken(words, evidence | {"digest of the protected files": describe(after)})


async def _looked(look: Look, broken: list[tuple[Operation, Result]]) -> dict[str, str]:
    """The evidence on results of which each is the agent's doing. Raises as `look`."""
    evidence: dict[str, str] = {}
    for op, result in broken:
        evidence |= await look(op, result)
    return evidence


def describe(result: Result) -> str:
    """How an operation ended, in words."""
    if result.timed_out:
        return f"timed out after {result.seconds:.1f} s"
    if result.signal is not None:
        return f"ended by signal {result.signal}"
    if result.exit_code is None:
        return broken_by_agent(result) or "did not end"
    return f"exit {result.exit_code}"
