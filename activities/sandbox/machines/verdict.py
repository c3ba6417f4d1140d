"""The verdict on an answer in a machine, and whose fault it is when the verifier gives none.

Owns the rule, the same as for native tasks: a verifier that gives no reward is asked once more; if it gives none again
it is asked about a known-good answer. Only this answer breaks it: the model's failure. Called by `SandboxActivities`
and `ratchet tasks check`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from activities.sandbox.channel import Operation
from activities.sandbox.containers import Sandbox
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import SandboxGone
from activities.sandbox.machines.grading import Answer, Examiner, Graded, LookAt
from activities.sandbox.machines.machines import Machines
from activities.sandbox.machines.reward import FULL
from activities.sandbox.verification import Look, Verdict, at_face_value, describe
from tasksets.base import ORACLE_S, Task
from workflows.errors import VerifierBrokenByAnswer, VerifierError


def believed(_: Sandbox) -> Look:
    """The `LookAt` of those who have no inquest."""
    return at_face_value


class MachineJudge:
    def __init__(self, backend: DockerBackend, machines: Machines) -> None:
        self._backend = backend
        self._machines = machines
        self._examiner = Examiner(backend, machines)

    async def judge(self, task: Task, answer: Answer, look_at: LookAt = believed, *, first: int = 1) -> Verdict:
        """`first` numbers the machines that grade. Raises VerifierBrokenByAnswer, VerifierError, SandboxError, or what
        looking raises."""
        evidence: dict[str, str] = {}
        for number in (first, first + 1):
            graded = await self._examiner.examine(task, answer, look_at, number)
            if graded.found.reward is not None:
                return _verdict(graded)
            evidence |= graded.evidence or {}
        words = f"{task.id}: {graded.found.words}; its output ends: {graded.said[-300:].strip() or '(nothing)'}"
        evidence |= {"verifier on this answer": graded.found.words}
        if not task.oracle:
            raise VerifierError(f"{words}; there is no solution to ask it about", retryable=False, evidence=evidence)
        async with self._known_good(task, answer) as good:
            proof = await self._examiner.examine(task, good, believed, first + 2)
        evidence |= {"verifier on a known-good answer": proof.found.words}
        if (proof.found.reward or 0.0) >= FULL:
            raise VerifierBrokenByAnswer(f"{words}; a known-good answer passes", evidence=evidence)
        raise VerifierError(f"{words}; on a known-good answer: {proof.found.words}", retryable=False, evidence=evidence)

    @asynccontextmanager
    async def _known_good(self, task: Task, answer: Answer) -> AsyncIterator[Answer]:
        """A fresh machine in which the oracle did its work, gone afterwards."""
        labels = answer.labels | {"generation": "9"}
        sandbox_id = self._backend.id_of(labels["attempt"], labels["kind"], 9)
        try:
            await self._backend.close(sandbox_id)
            spec = replace(await self._machines.spec(task), runtime=answer.runtime)
            sandbox = await self._backend.acquire(spec, labels)
            await self._machines.prepare(task, sandbox)
            await self.run_oracle(task, sandbox_id)
            yield Answer(sandbox_id, sandbox.image_id, answer.labels, answer.runtime)
        except SandboxGone as gone:
            words = f"the machine of the proof for {task.id}: {gone}"
            raise VerifierError(words, retryable=not gone.by_agent, evidence=gone.evidence) from gone
        finally:
            await self._backend.close(sandbox_id)

    async def run_oracle(self, task: Task, sandbox_id: str) -> str:
        """Do what solves the task as its agent; how the first command failed, empty where none did."""
        assert task.machine is not None
        failed = ""
        for turn, command in enumerate(task.oracle):
            op = Operation(
                op_id=f"act-t{turn}",
                command=command,
                timeout_s=task.machine.agent_timeout_s or ORACLE_S,
                person=self._machines.person(sandbox_id),
            )
            result = await self._backend.run(sandbox_id, op)
            if result.exit_code != 0 and not failed:
                said = (result.tail or result.head).decode(errors="replace")[-300:].strip()
                failed = f"{describe(result)}: {said}"
        return failed


def _verdict(graded: Graded) -> Verdict:
    reward = graded.found.reward
    assert reward is not None
    words = graded.found.words
    evidence = {"tampered": words[:1000]} if graded.found.tampered else graded.evidence or {}
    return Verdict(
        passed=reward >= FULL,
        detail=words[:500],
        tampered=graded.found.tampered,
        partial=reward,
        seconds=graded.seconds,
        evidence=evidence,
    )
