"""The sandbox activities: acquire, act, verify, release, sweep.

Owns the translation between messages and the backend. Promises: a retried acquire gives the sandbox of its first try, a
command runs at most once per key whoever dies, what the agent did to its sandbox comes back as a result and what
infrastructure did as an error, and a release is idempotent. Called by the Episode and TrainingRun workflows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from temporalio import activity

from activities.sandbox.channel import Operation
from activities.sandbox.container import SandboxSpec
from activities.sandbox.docker import DockerBackend
from activities.sandbox.evidence import SandboxGone, broken_by_agent
from activities.sandbox.text import cap_bytes, render
from activities.sandbox.verification import CHECK_S, Run, check_operation, judge, set_up
from tasksets.base import Task, Taskset
from workflows.contracts import (
    AcquireInput,
    AcquireOutput,
    ActInput,
    ActOutput,
    ReleaseInput,
    SandboxLease,
    SweepInput,
    SweepOutput,
    Timing,
    VerifyInput,
    VerifyOutput,
)
from workflows.errors import SandboxError, VerifierBrokenByAnswer


class SandboxActivities:
    """`host` names this machine in leases; `open_taskset` is `tasksets.open_taskset`."""

    def __init__(self, backend: DockerBackend, open_taskset: Callable[[str], Taskset], host: str) -> None:
        self._backend = backend
        self._open_taskset = open_taskset
        self._host = host

    @activity.defn(name="acquire")
    async def acquire(self, input: AcquireInput) -> AcquireOutput:
        """A sandbox that is set up for the task. Raises SandboxError; a failed setup is final and leaves nothing."""
        queue_s, began = _queued(), time.monotonic()
        task = await self._task(input.task.taskset, input.task.task_id)
        labels = {
            "kind": "agent",
            "run": input.run,
            "group": input.group_id,
            "episode": input.attempt_id.rpartition("/")[0],
            "attempt": input.attempt_id,
            "task": task.id,
        }
        sandbox = await self._backend.acquire(SandboxSpec(image=task.image), labels)
        try:
            await set_up(task, partial(self._backend.run, sandbox.id))
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
        )
        run_s = time.monotonic() - began - sandbox.waited_s
        return AcquireOutput(lease=lease, timing=Timing(queue_s=queue_s + sandbox.waited_s, run_s=run_s))

    @activity.defn(name="act")
    async def act(self, input: ActInput) -> ActOutput:
        """Run one command of the agent, at most once per (sandbox, op_id). Raises SandboxError."""
        queue_s, began = _queued(), time.monotonic()
        self._mine(input.lease)
        op = Operation(
            op_id=f"act-{input.op_id}",
            command=input.command,
            timeout_s=input.step_timeout_s,
            cap_bytes=cap_bytes(input.max_output_chars),
        )
        try:
            result = await self._backend.run(input.lease.sandbox_id, op)
        except SandboxGone as gone:
            if not gone.by_agent:
                raise
            spent = time.monotonic() - began
            return ActOutput(
                exit_code=None,
                sandbox_broken=str(gone),
                command_s=min(spent, input.step_timeout_s),
                timing=Timing(queue_s=queue_s, run_s=spent),
            )
        return ActOutput(
            exit_code=result.exit_code,
            signal=result.signal if not result.timed_out else None,
            timed_out=result.timed_out,
            output=render(result, input.max_output_chars),
            total_bytes=result.total_bytes,
            sandbox_broken=broken_by_agent(result),
            command_s=result.seconds,
            replayed=result.replayed,
            timing=Timing(queue_s=queue_s, run_s=time.monotonic() - began),
        )

    @activity.defn(name="verify")
    async def verify(self, input: VerifyInput) -> VerifyOutput:
        """Kill what the agent left running, then check. Raises SandboxError, VerifierError, VerifierBrokenByAnswer."""
        queue_s, began = _queued(), time.monotonic()
        self._mine(input.lease)
        task = await self._task(input.task.taskset, input.task.task_id)
        sandbox_id = input.lease.sandbox_id
        try:
            # A retry must not kill the check that its first try began.
            if await self._backend.ask(sandbox_id, check_operation(task, input.answer, 1).op_id, CHECK_S) is None:
                await self._backend.kill_agent(sandbox_id)
            passed, detail = await judge(
                task, input.answer, partial(self._backend.run, sandbox_id), partial(self._fresh, task, input.lease)
            )
        except SandboxGone as gone:
            if gone.by_agent:
                raise VerifierBrokenByAnswer(f"no check is possible: {gone}") from gone
            raise
        timing = Timing(queue_s=queue_s, run_s=time.monotonic() - began)
        return VerifyOutput(reward=1.0 if passed else 0.0, passed=passed, detail=detail, timing=timing)

    @activity.defn(name="release")
    async def release(self, input: ReleaseInput) -> None:
        """Remove the attempt's sandboxes, also those that it never learnt of."""
        if input.lease is not None:
            self._mine(input.lease)
        await self._backend.close_attempt(input.attempt_id)

    @activity.defn(name="sweep")
    async def sweep(self, input: SweepInput) -> SweepOutput:
        """Remove what a closed run left on this host: containers and their folders."""
        containers, files = await self._backend.sweep(input.run)
        return SweepOutput(containers=containers, files=files)

    @asynccontextmanager
    async def _fresh(self, task: Task, lease: SandboxLease) -> AsyncIterator[Run]:
        """A sandbox for the proof that the verifier works, gone afterwards."""
        labels = {"kind": "verifier", "run": _run_of(lease.attempt_id), "attempt": lease.attempt_id, "task": task.id}
        sandbox_id = self._backend.id_of(lease.attempt_id, "verifier")
        try:
            # An earlier try may have left one half way through its oracle.
            await self._backend.close(sandbox_id)
            await self._backend.acquire(SandboxSpec(image=task.image), labels)
            yield partial(self._backend.run, sandbox_id)
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
