"""Tasks with machines of their own, played on real containers as the workflow plays them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from activities.sandbox.channel import Operation, Result
from activities.sandbox.docker import DockerBackend
from activities.sandbox.machines.grading import Answer
from activities.sandbox.machines.machines import Machines
from activities.sandbox.machines.verdict import MachineJudge
from activities.sandbox.verification import Verdict
from tasksets.base import Task
from tasksets.folder import FolderTaskset
from tests.tasksets.public import HARBOR, TERMINAL_BENCH, write_task
from workflows.contracts import Split

BASES = Path(tempfile.gettempdir()) / "ratchet-test-bases"
"""Where the Debian of all tests of this machine is kept: making it takes a minute or two."""
_numbers = itertools.count()


def machine_backend(docker_host: str, state: Path) -> DockerBackend:
    BASES.mkdir(exist_ok=True)
    state.mkdir(parents=True, exist_ok=True)
    (state / "bases").symlink_to(BASES)
    return DockerBackend(docker_host, state, slots=16, local_bases=True)


def harbor(folder: Path, **changes: str | None) -> Task:
    return one(write_task(folder / f"harbor-{next(_numbers)}", HARBOR, **changes))


def terminal_bench(folder: Path, **changes: str | None) -> Task:
    return one(write_task(folder / f"bench-{next(_numbers)}", TERMINAL_BENCH, **changes))


def one(folder: Path) -> Task:
    taskset = FolderTaskset(folder)
    return taskset.load(taskset.ids(Split.TRAIN)[0])


class Attempt:
    """One agent in its machine: `await attempt(command)` runs as it."""

    def __init__(self, backend: DockerBackend, machines: Machines, judge: MachineJudge, task: Task) -> None:
        self.backend, self.machines, self.judge, self.task = backend, machines, judge, task
        self.attempt = f"machines/g0/e0/a{next(_numbers)}"
        self.id = backend.id_of(self.attempt)
        self.image_id = ""
        self._turns = itertools.count()

    async def begin(self) -> None:
        labels = {"kind": "agent", "run": "machines", "attempt": self.attempt, "task": self.task.id}
        sandbox = await self.backend.acquire(await self.machines.spec(self.task), labels)
        self.image_id = sandbox.image_id
        await self.machines.prepare(self.task, sandbox)

    async def __call__(self, command: str, timeout_s: float = 60) -> Result:
        op = Operation(
            op_id=f"act-x{next(self._turns)}",
            command=command,
            timeout_s=timeout_s,
            person=self.machines.person(self.id),
        )
        return await self.backend.run(self.id, op)

    async def out(self, command: str) -> str:
        result = await self(command)
        return (result.head + result.tail).decode().strip()

    async def oracle(self) -> str:
        return await self.judge.run_oracle(self.task, self.id)

    async def verdict(self, first: int = 1) -> Verdict:
        labels = {"kind": "grader", "run": "machines", "attempt": self.attempt, "task": self.task.id}
        return await self.judge.judge(self.task, Answer(self.id, self.image_id, labels), first=first)


class Ground:
    """Where tasks are played; one per session, as images and facts are made once."""

    def __init__(self, backend: DockerBackend) -> None:
        self.backend = backend
        self.machines = Machines(backend)
        self.judge = MachineJudge(backend, self.machines)

    @asynccontextmanager
    async def playing(self, task: Task) -> AsyncIterator[Attempt]:
        attempt = Attempt(self.backend, self.machines, self.judge, task)
        try:
            await attempt.begin()
            yield attempt
        finally:
            await self.backend.close(attempt.id)
