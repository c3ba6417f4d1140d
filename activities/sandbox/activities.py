"""The sandbox activities: acquire, act, replay, verify, release, sweep.

Owns the translation between messages and the backend. Promises: a retried acquire gives the sandbox of its first try, a
command runs at most once per key whoever dies, what the agent did to its sandbox comes back as a result and what
infrastructure did as an error, and a release is idempotent. Called by the Episode and TrainingRun workflows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from temporalio import activity

from activities.sandbox.channel import Operation, Result
from activities.sandbox.commands import agent_operation, output_digest
from activities.sandbox.containers import Sandbox
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import Blame, SandboxGone, broken_by_agent
from activities.sandbox.inquest import Doing, Inquest, Start
from activities.sandbox.machines.grading import Answer
from activities.sandbox.machines.machines import Machines
from activities.sandbox.machines.verdict import MachineJudge
from activities.sandbox.preparation import Preparation
from activities.sandbox.text import render
from activities.sandbox.verification import CHECK_S, Look, Run, Verdict, check_operation, describe, judge
from tasksets.base import Task, Taskset
from workflows.contracts import (
    AcquireInput,
    AcquireOutput,
    ActInput,
    ActOutput,
    JournalEntry,
    ReleaseInput,
    ReplayInput,
    ReplayOutput,
    SandboxLease,
    SweepInput,
    SweepOutput,
    Timing,
    VerifyInput,
    VerifyOutput,
)
from workflows.errors import SandboxError, VerifierBrokenByAnswer, VerifierError


class SandboxActivities:
    """`host` names this machine in leases; `queue` is where calls on its sandboxes go, empty where that is the queue of
    their episodes; `open_taskset` is `tasksets.open_taskset`."""

    def __init__(
        self, backend: DockerBackend, open_taskset: Callable[[str], Taskset], host: str, *, queue: str = ""
    ) -> None:
        self._backend = backend
        self._open_taskset = open_taskset
        self._host = host
        self._queue = queue
        self._inquest = Inquest(backend)
        self._machines = Machines(backend)
        self._preparation = Preparation(backend, self._machines)
        self._judge = MachineJudge(backend, self._machines)

    @activity.defn(name="acquire")
    async def acquire(self, input: AcquireInput) -> AcquireOutput:
        """A sandbox that is prepared for the task; those that the attempt lost before are removed first.

        Raises SandboxError; a failed setup is final and leaves nothing."""
        queue_s, began = _queued(), time.monotonic()
        task = await self._task(input.task.taskset, input.task.task_id)
        labels = {
            "kind": "agent",
            "run": input.run,
            "group": input.group_id,
            "episode": input.attempt_id.rpartition("/")[0],
            "attempt": input.attempt_id,
            "task": task.id,
            "generation": str(input.generation),
        }
        for lost in range(input.generation):
            await self._backend.close(self._backend.id_of(input.attempt_id, generation=lost))
        spec = replace(await self._machines.spec(task), runtime=input.runtime)
        sandbox = await self._backend.acquire(spec, labels)
        try:
            forked = await self._preparation.prepare(task, sandbox)
        except SandboxError as error:
            if not error.retryable:
                await self._backend.close(sandbox.id)
            raise
        lease = SandboxLease(
            sandbox_id=sandbox.id,
            container_id=sandbox.container_id,
            image_id=sandbox.image_id,
            host=self._host,
            attempt_id=input.attempt_id,
            queue=self._queue,
            runtime=input.runtime,
        )
        run_s = time.monotonic() - began - sandbox.waited_s
        timing = Timing(queue_s=queue_s + sandbox.waited_s, run_s=run_s)
        grading_s = task.machine.grading_s if task.machine else 0.0
        return AcquireOutput(lease=lease, warm=sandbox.warm, forked=forked, grading_s=grading_s, timing=timing)

    @activity.defn(name="act")
    async def act(self, input: ActInput) -> ActOutput:
        """Run one command of the agent, at most once per (sandbox, op_id). Raises SandboxError, Undetermined."""
        queue_s, began = _queued(), time.monotonic()
        self._mine(input.lease)
        op = agent_operation(
            input.op_id,
            input.command,
            timeout_s=input.step_timeout_s,
            max_output_chars=input.max_output_chars,
            person=self._machines.person(input.lease.sandbox_id),
        )
        before = self._inquest.begin()
        storage = self._machines.storage(input.lease.sandbox_id)
        try:
            async with storage.watched():
                result = await self._backend.run(input.lease.sandbox_id, op)
            await self._machines.services.attend(input.lease.sandbox_id)
        except SandboxGone as gone:
            spent = time.monotonic() - began
            doing = await self._inquest.on_death(input.lease, gone, before)
            return ActOutput(
                exit_code=None,
                sandbox_broken=doing.broken,
                evidence=doing.evidence or {},
                command_s=min(spent, input.step_timeout_s),
                timing=Timing(queue_s=queue_s, run_s=spent),
            )
        if full := await storage.full():
            doing = Doing(full, {"sign": full, "blame": Blame.AGENT})
        else:
            doing = await self._inquest.on_result(input.lease, op, result, before)
        return ActOutput(
            exit_code=result.exit_code,
            signal=result.signal if not result.timed_out else None,
            timed_out=result.timed_out,
            output=render(result, input.max_output_chars),
            total_bytes=result.total_bytes,
            sandbox_broken=doing.broken,
            evidence=doing.evidence or {},
            command_s=result.seconds,
            replayed=result.replayed,
            output_digest=output_digest(result),
            timing=Timing(queue_s=queue_s, run_s=time.monotonic() - began),
        )

    @activity.defn(name="replay")
    async def replay(self, input: ReplayInput) -> ReplayOutput:
        """Run a lost sandbox's commands in a fresh one, under their own keys, up to the first that ends otherwise.

        Raises SandboxError."""
        queue_s, began = _queued(), time.monotonic()
        self._mine(input.lease)
        differs_at, why = await self._first_difference(input)
        timing = Timing(queue_s=queue_s, run_s=time.monotonic() - began)
        return ReplayOutput(differs_at=differs_at, why=why, timing=timing)

    async def _first_difference(self, input: ReplayInput) -> tuple[int | None, str]:
        person = self._machines.person(input.lease.sandbox_id)
        for entry in input.entries:
            op = agent_operation(
                entry.op_id,
                entry.command,
                timeout_s=entry.step_timeout_s,
                max_output_chars=input.max_output_chars,
                person=person,
            )
            if why := await self._difference(input.lease.sandbox_id, op, entry):
                return entry.turn, why
        return None, ""

    async def _difference(self, sandbox_id: str, op: Operation, entry: JournalEntry) -> str:
        """How the command's end differs from the recorded one; empty where it does not."""
        try:
            result = await self._backend.run(sandbox_id, op)
        except SandboxGone as gone:
            if not gone.by_agent:
                raise
            return f"it broke the sandbox ({gone}), recorded was {entry.ending}"
        if broken := broken_by_agent(result):
            return f"it broke the sandbox ({broken}), recorded was {entry.ending}"
        if output_digest(result) != entry.output_digest:
            return f"{describe(result)}, {result.total_bytes} bytes, recorded was {entry.ending}"
        return ""

    @activity.defn(name="verify")
    async def verify(self, input: VerifyInput) -> VerifyOutput:
        """What the answer is worth. Raises SandboxError, VerifierError, VerifierBrokenByAnswer, Undetermined."""
        queue_s, began = _queued(), time.monotonic()
        self._mine(input.lease)
        task = await self._task(input.task.taskset, input.task.task_id)
        before = self._inquest.begin()
        judge_it = self._judge_machine if task.machine is not None else self._judge_sandbox
        verdict = await judge_it(task, input, before)
        timing = Timing(queue_s=queue_s, run_s=time.monotonic() - began)
        return VerifyOutput(
            reward=verdict.reward,
            passed=verdict.passed,
            detail=verdict.detail,
            tampered=verdict.tampered,
            evidence=verdict.evidence,
            timing=timing,
        )

    async def _judge_machine(self, task: Task, input: VerifyInput, before: Start) -> Verdict:
        """What is killed is the whole machine; the check runs in another."""
        lease = input.lease

        def look_at(sandbox: Sandbox) -> Look:
            theirs = lease.model_copy(update={"sandbox_id": sandbox.id, "container_id": sandbox.container_id})

            async def look(op: Operation, result: Result) -> dict[str, str]:
                return (await self._inquest.on_result(theirs, op, result, before)).evidence or {}

            return look

        labels = {"kind": "grader", "run": _run_of(lease.attempt_id), "attempt": lease.attempt_id, "task": task.id}
        return await self._judge.judge(task, Answer(lease.sandbox_id, lease.image_id, labels, lease.runtime), look_at)

    async def _judge_sandbox(self, task: Task, input: VerifyInput, before: Start) -> Verdict:
        """Kill what the agent left running, then check where it was."""
        sandbox_id = input.lease.sandbox_id
        run_in = self._preparation.run_in(task, sandbox_id)

        async def run(op: Operation) -> Result:
            async with self._outlived(input.lease, before):
                return await run_in(op)

        async def look(op: Operation, result: Result) -> dict[str, str]:
            return (await self._inquest.on_result(input.lease, op, result, before)).evidence or {}

        async with self._outlived(input.lease, before):
            # A retry must not kill the check that its first try began.
            if await self._backend.ask(sandbox_id, check_operation(task, input.answer, 1).op_id, CHECK_S) is None:
                await self._backend.kill_agent(sandbox_id)
        return await judge(task, input.answer, run, partial(self._fresh, task, input.lease), look)

    @activity.defn(name="release")
    async def release(self, input: ReleaseInput) -> None:
        """Begin to remove the attempt's sandboxes, also those that it never learnt of; its report does not wait for the
        end of that."""
        if input.lease is not None:
            self._mine(input.lease)
        await self._backend.release_attempt(input.attempt_id)

    @activity.defn(name="sweep")
    async def sweep(self, input: SweepInput) -> SweepOutput:
        """Remove what a closed run left on this host: containers and their folders."""
        containers, files = await self._backend.sweep(input.run)
        return SweepOutput(containers=containers, files=files)

    @asynccontextmanager
    async def _outlived(self, lease: SandboxLease, before: Start) -> AsyncIterator[None]:
        """The attempt's own sandbox is asked something: its death by the agent is VerifierBrokenByAnswer."""
        try:
            yield
        except SandboxGone as gone:
            doing = await self._inquest.on_death(lease, gone, before)
            raise VerifierBrokenByAnswer(f"no check is possible: {gone}", evidence=doing.evidence) from gone

    @asynccontextmanager
    async def _fresh(self, task: Task, lease: SandboxLease) -> AsyncIterator[Run]:
        """A prepared sandbox for the proof that the verifier works, gone afterwards. Its death is a VerifierError, and
        final where its own memory limit took it, as that of the next one would."""
        labels = {"kind": "verifier", "run": _run_of(lease.attempt_id), "attempt": lease.attempt_id, "task": task.id}
        sandbox_id = self._backend.id_of(lease.attempt_id, "verifier")
        try:
            # An earlier try may have left one half way through its oracle.
            await self._backend.close(sandbox_id)
            spec = replace(await self._machines.spec(task), runtime=lease.runtime)
            sandbox = await self._backend.acquire(spec, labels)
            # As the attempt's own: a snapshot that breaks the check breaks the proof as well.
            await self._preparation.prepare(task, sandbox)
            yield self._preparation.run_in(task, sandbox_id)
        except SandboxGone as gone:
            words = f"the sandbox of the proof for {task.id}: {gone}"
            raise VerifierError(words, retryable=not gone.by_agent, evidence=gone.evidence) from gone
        finally:
            await self._backend.close(sandbox_id)

    async def _task(self, taskset: str, task_id: str) -> Task:
        return await asyncio.to_thread(lambda: self._open_taskset(taskset).load(task_id))

    def _mine(self, lease: SandboxLease) -> None:
        """Raises SandboxError (retryable: another host's worker takes it) for a sandbox of another machine."""
        if lease.host != self._host:
            raise SandboxError(f"sandbox {lease.sandbox_id} lives on {lease.host}, this is {self._host}")


def _queued() -> float:
    """Seconds that this try waited for a worker."""
    info = activity.info()
    return max((info.started_time - info.current_attempt_scheduled_time).total_seconds(), 0.0)


def _run_of(attempt_id: str) -> str:
    """`<run>` of `<run>/g<n>/e<k>/a<m>`; a run's id may hold slashes itself."""
    return attempt_id.rsplit("/", 3)[0]
