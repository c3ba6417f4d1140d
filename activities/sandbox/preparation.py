"""Prepares a sandbox for a task: runs its setup, or writes what the setup left in another sandbox into this one.

Owns the decision. The first sandbox of an environment (image, setup, limits, tools) runs the setup and what it wrote is
kept as a snapshot; those that come meanwhile wait for it, and they and all later ones are forks. Promises: a fork has
what the setup wrote, to the nanosecond of its times; where that can't be kept (processes left running, sockets, too
large: `snap.c` has the list) every sandbox runs the setup itself; a setup that fails is everybody's own failure, as
without snapshots; a retried preparation does nothing twice. Processes are in no snapshot. Called by `SandboxActivities`
and by `ratchet replay`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from functools import partial
from pathlib import Path

from activities.sandbox.boxes import named_disk
from activities.sandbox.channel import BOX, TOOLS, Operation, Result
from activities.sandbox.container import Bind, SandboxSpec
from activities.sandbox.containers import Sandbox
from activities.sandbox.docker import DockerBackend
from activities.sandbox.machines.machines import Machines
from activities.sandbox.services import native_spec, native_start, native_task
from activities.sandbox.snapshots import Snapshots
from activities.sandbox.verification import (
    SETUP_S,
    Run,
    check_setup,
    describe,
    note_protected,
    run_setup,
    setup_operation,
)
from tasksets.base import Service, Task
from workflows.errors import SandboxError

log = logging.getLogger(__name__)

FOLDERS = ("/work", "/data", "/tmp")
"""All that can be written in a sandbox, but /dev, where `snap` looks as well."""
MOST_BYTES = 256 << 20
"""Of one snapshot."""
SNAP_S = 30.0
REFUSED, UNREADABLE = 3, 97
"""How `snap` ends."""
FORKED = b"forked\n"
ARCHIVE = "snapshot"
FILL, KEEP = "setup", "keep"
"""Keys of the operations. Setup and fork have one: a sandbox is filled once, whoever tries."""


class Preparation:
    """All of one state folder share its snapshots."""

    def __init__(self, backend: DockerBackend, machines: Machines | None = None) -> None:
        self._backend = backend
        self._machines = machines or Machines(backend)
        self._snapshots = Snapshots(backend.state / "snapshots")
        self._first: dict[str, asyncio.Event] = {}

    async def prepare(self, task: Task, sandbox: Sandbox) -> bool:
        """Make the sandbox and its services ready for the agent; whether it is a fork. Raises SandboxError, final for a
        failed setup."""
        if task.machine is not None:
            # What its setup would leave is in its image.
            await self._machines.prepare(task, sandbox)
            return False
        run = partial(self._backend.run, sandbox.id)
        with named_disk():
            try:
                forked = await self._fill(task, sandbox, run)
            finally:
                # The file is the host's own: no command of a task may find it where it can write.
                self._archive(sandbox).unlink(missing_ok=True)
        if sandbox.found:
            # Of an earlier try that was only overtaken: nothing may be kept once the agent has begun.
            await run(Operation(op_id=KEEP, command="exit 4", timeout_s=SNAP_S, root=True))
        await note_protected(task, run)

        async def spec_of(service: Service) -> SandboxSpec:
            return native_spec(task, service)

        await self._machines.services.open(task, sandbox, spec_of, self._furnish)
        return forked

    async def _furnish(self, service: Service, sandbox: Sandbox) -> Operation:
        await self.prepare(native_task(service), sandbox)
        return native_start(service)

    def binds(self, task: Task) -> tuple[Bind, ...]:
        """What of the host a native task's sandbox has to be acquired with. Raises SandboxError."""
        return self._machines.services.binds(task)

    def run_in(self, task: Task, sandbox_id: str) -> Run:
        """Runs operations in a sandbox that was prepared for a native task. Raises what the backend does, and
        ServiceFailed for a check."""
        run = partial(self._backend.run, sandbox_id)
        return self._machines.services.checked(task, sandbox_id, run) if task.services else run

    async def _fill(self, task: Task, sandbox: Sandbox, run: Run) -> bool:
        key = key_of(task, sandbox)
        if sandbox.found and (begun := await self._backend.ask(sandbox.id, FILL, SETUP_S)) is not None:
            # An earlier try decided, perhaps one that still lives.
            return await self._filled(key, task, sandbox, begun)
        if not sandbox.recipe.sbxd:
            await run_setup(task, run)
            return False
        if not self._known(key):
            if first := self._first.get(key):
                await first.wait()
            else:
                return await self._prepare_first(key, task, sandbox, run)
        if self._snapshots.link(key, self._archive(sandbox)):
            result = await run(_trusted(FILL, f"{TOOLS}/snap load {BOX}/{ARCHIVE}"))
            return await self._filled(key, task, sandbox, result)
        await run_setup(task, run)
        return False

    async def _filled(self, key: str, task: Task, sandbox: Sandbox, result: Result) -> bool:
        """Whether it was by a fork. Raises SandboxError: retryable, and the sandbox is gone, for a snapshot that can't
        be read, which the retry finds no more."""
        if result.exit_code == UNREADABLE and _said(result).startswith("snap: "):
            self._snapshots.drop(key)
            await self._backend.close(sandbox.id)
            raise SandboxError(f"a snapshot can't be read: {_said(result)}")
        check_setup(task, result)
        return result.head == FORKED

    async def _prepare_first(self, key: str, task: Task, sandbox: Sandbox, run: Run) -> bool:
        """As the first here; whoever waits goes on when this returns or raises, whatever came of it."""
        done = self._first[key] = asyncio.Event()
        try:
            async with self._snapshots.alone(key):
                if not self._known(key):
                    await run_setup(task, run)
                    await self._keep(key, sandbox, run)
                    return False
        finally:
            del self._first[key]
            done.set()
        return await self._fill(task, sandbox, run)

    def _known(self, key: str) -> bool:
        return self._snapshots.has(key) or bool(self._snapshots.refused(key))

    async def _keep(self, key: str, sandbox: Sandbox, run: Run) -> None:
        command = f"{TOOLS}/snap save {BOX}/{ARCHIVE} {MOST_BYTES} {' '.join(FOLDERS)}"
        result = await run(_trusted(KEEP, command))
        archive = self._archive(sandbox)
        if result.exit_code == 0 and not result.replayed:
            self._snapshots.add(key, archive)
            return
        archive.unlink(missing_ok=True)
        if result.exit_code == REFUSED:
            self._snapshots.refuse(key, _said(result))
        log.warning("the setup of a task is not kept, each sandbox runs it: %s, %s", describe(result), _said(result))

    def _archive(self, sandbox: Sandbox) -> Path:
        return self._backend.boxes.box(sandbox.id) / ARCHIVE


def key_of(task: Task, sandbox: Sandbox) -> str:
    """Content hash of the environment: everything that what the setup leaves may depend on."""
    op = setup_operation(task)
    environment = sandbox.recipe.contents | {"setup": op.text, "variables": op.environment, "folders": FOLDERS}
    return hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:40]


def _trusted(op_id: str, command: str) -> Operation:
    """As root, by a path that no agent can write; the shell makes way, so that no second process is there."""
    return Operation(op_id=op_id, command=f"exec {command}", timeout_s=SNAP_S, root=True)


def _said(result: Result) -> str:
    return (result.tail or result.head).decode(errors="replace").strip()[-300:]
