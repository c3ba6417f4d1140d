"""Sandboxes as Docker containers on this host.

Owns their life: take from the warm pool or start, find again, run commands in, tell why one is gone, remove. Promises:
one sandbox per attempt, kind and generation whatever is retried (its id, and with it its folder, is derived from them),
a command at most once per key, an idempotent close, and that the daemon's absence is retryable while a container's loss
is final. Called by `SandboxActivities` and by `ratchet replay`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from activities.sandbox.boxes import CONTAINER, Boxes, named_disk
from activities.sandbox.cgroup import PARENT
from activities.sandbox.channel import Channel, ChannelLost, Operation, Result, journaled, until_ready
from activities.sandbox.container import SandboxSpec
from activities.sandbox.containers import MACHINE, TRANSPORT, Containers, Recipe, Sandbox
from activities.sandbox.daemon import Daemon, whole
from activities.sandbox.evidence import SandboxGone, cause_of_death, silenced
from activities.sandbox.machines.state import forget
from activities.sandbox.members import CONTAINER_ID, PREFIX, Members
from activities.sandbox.owned import Owned, matched
from activities.sandbox.pool import WarmPool
from activities.sandbox.removals import Removals
from activities.sandbox.slots import Slots
from workflows.errors import SandboxError

log = logging.getLogger(__name__)
Value = TypeVar("Value")

GRADING = "grading"
"""Below the state folder: what is mounted for the verifiers of machines, a folder each."""
READY_S = 10.0
SETTLE_S = 2.0
"""How long the daemon may take to notice that a container ended."""
POOLED = ("agent", "verifier")
"""Kinds that the pool serves: a canary is to prove that a start works, a replay is a person's. Machines of tasks are of
too many kinds to hold any ready."""


class DockerBackend:
    """`docker_host` empty is the local socket; `state_dir` holds the toolbox and one folder per sandbox; at most
    `slots` agents' sandboxes live at once, and beside them at most `pool` that nobody asked for yet, once `keep_warm`
    was called. `use_sbxd` False takes `docker exec` for every command. `parent` is the control group that all of them
    are in, `namespace` (`<name>/<id>`) that of the workflows that they are made for. `local_bases`: a Debian made here
    may stand in for base images of tasks that are not to be had."""

    def __init__(
        self,
        docker_host: str,
        state_dir: Path,
        slots: int,
        *,
        pool: int = 0,
        use_sbxd: bool = True,
        parent: str = PARENT,
        namespace: str = "",
        local_bases: bool = False,
    ) -> None:
        self.local_bases = local_bases
        self.state = state_dir.resolve()
        self._stack = hashlib.sha256(str(self.state).encode()).hexdigest()[:12]
        self.daemon = self._daemon = Daemon(docker_host)
        self.boxes = self._boxes = Boxes(self.state / "sandboxes")
        self.slots = slots
        self._slots = Slots(slots, partial(self._folders_with, "ratchet.kind", "agent"), self._living)
        self._containers = Containers(
            self._daemon, self.state, self._stack, use_sbxd=use_sbxd, parent=parent, namespace=namespace
        )
        self._members = Members(self.state / "pool", self._boxes)
        self._pool = WarmPool(self._members, self._containers, pool, self.close) if pool else None
        self._locks: dict[str, asyncio.Lock] = {}
        self._removals = Removals()

    def id_of(self, attempt: str, kind: str = "agent", generation: int = 0) -> str:
        """The sandbox id of an attempt, which is its container's name: the same in every process of this stack.
        `generation` counts the sandboxes that the attempt lost before this one."""
        words = [self._stack, attempt, kind, *([str(generation)] if generation else [])]
        return "ratchet-" + hashlib.sha256("|".join(words).encode()).hexdigest()[:20]

    def id_for(self, labels: dict[str, str]) -> str:
        """That of the sandbox which `acquire` gives for these labels."""
        parts = [labels.get("kind", "agent"), *(labels[name] for name in ("beside", "service") if name in labels)]
        return self.id_of(labels["attempt"], "/".join(parts), int(labels.get("generation", "0")))

    async def keep_warm(self, spec: SandboxSpec) -> None:
        """Begin to keep the pool, with `spec` as what will be asked for, and finish the releases of dead workers."""
        for sandbox_id in await asyncio.to_thread(self._boxes.released):
            self.forget(sandbox_id)
        if self._pool is not None:
            self._pool.keep(spec)

    def waiting(self) -> dict[str, int]:
        """Sandboxes of the pool that answer and that nobody took, by the key of their recipe."""
        return {key: len(members) for key, members in self._members.ready().items()}

    async def living(self) -> set[str]:
        """Agents' sandboxes that have a slot here. Raises SandboxError."""
        return await self._slots.held()

    async def acquire(self, spec: SandboxSpec, labels: dict[str, str]) -> Sandbox:
        """A running sandbox for `labels["attempt"]`, `labels["kind"]` (`agent`, `verifier`, `canary`, `replay` or
        `service`, which has `beside` and `service` as well) and `labels["generation"]`, the one of an earlier try where
        there is one. Raises SandboxError, InvalidConfig for an
        unknown image."""
        kind = labels.get("kind", "agent")
        sandbox_id = self.id_for(labels)
        # A verifier's sandbox serves one that holds a slot already; waiting for another could wait for ever.
        waited = await self._slots.take(sandbox_id) if kind == "agent" else 0.0
        try:
            async with self._locks.setdefault(sandbox_id, asyncio.Lock()):
                recipe = await self._containers.recipe(spec)
                found = self._boxes.there(sandbox_id)
                all_labels = self._containers.labels(recipe, labels)
                pooled = kind in POOLED and not spec.machine
                taken = await self._take(sandbox_id, recipe, all_labels) if not found and pooled else None
                if taken is not None:
                    return Sandbox(sandbox_id, taken[CONTAINER_ID], recipe, True, False, waited)
                container_id = await whole(self._start(sandbox_id, recipe, all_labels, queued=kind != "canary"))
                await self._ready(sandbox_id)
                warm = CONTAINER_ID in self._boxes.labels(sandbox_id)
                return Sandbox(sandbox_id, container_id, recipe, warm, found, waited)
        finally:
            self._slots.started(sandbox_id)

    async def run(self, sandbox_id: str, op: Operation) -> Result:
        """Raises SandboxGone (final) when there is no sandbox any more, SandboxError when it can't be reached."""
        try:
            return await self._channel(sandbox_id).run(op)
        except ChannelLost as lost:
            try:
                if found := journaled(self._boxes.box(sandbox_id), op.op_id):
                    return found
            except SandboxError as unreadable:
                raise silenced(str(unreadable)) if op.person else unreadable from lost
            dead = await self._autopsy(sandbox_id, lost)
            # Where the agent may be root it can take the channel away; a host that does is found out by the inquest.
            raise silenced(str(lost)) if op.person and not isinstance(dead, SandboxGone) else dead from lost

    async def ask(self, sandbox_id: str, op_id: str, wait_s: float) -> Result | None:
        """The result of a key, None where it was never started. Raises as `run`."""
        return await self._answered(sandbox_id, self._channel(sandbox_id).ask(op_id, wait_s))

    def folder(self, sandbox_id: str) -> Path:
        """The sandbox's folder on this host, which is mounted into it where root alone reaches it."""
        return self._boxes.box(sandbox_id)

    async def kill_agent(self, sandbox_id: str) -> None:
        """Kill every process that the agent left. Raises as `run`."""
        await self._answered(sandbox_id, self._channel(sandbox_id).kill_agent())

    async def close(self, sandbox_id: str) -> None:
        """Remove the container and its folder. Idempotent; goes on when the caller is cancelled."""
        await asyncio.shield(self.forget(sandbox_id))

    def forget(self, sandbox_id: str) -> asyncio.Task[None]:
        """Begin to close a sandbox; where nobody waits for it, one that can't be closed is the janitor's."""
        return self._removals.begin(self._close(sandbox_id))

    async def close_attempt(self, attempt: str) -> None:
        """Remove whatever an attempt has here, also what a lost try of `acquire` made."""
        ids = {self.id_of(attempt), self.id_of(attempt, "verifier")}
        ids |= await self._names({"ratchet.attempt": attempt})
        ids |= await self._folders_with("ratchet.attempt", attempt)
        await self._close_all(ids)

    async def release_attempt(self, attempt: str) -> None:
        """Begin `close_attempt` and come back. What is marked is removed whatever becomes of this process: by it, by
        the next one's `keep_warm`, or by the janitor."""
        for sandbox_id in await self._folders_with("ratchet.attempt", attempt):
            self._boxes.release(sandbox_id)
        self._removals.insist(f"the sandbox of {attempt}", partial(self.close_attempt, attempt))

    async def sweep(self, run: str) -> tuple[int, int]:
        """Remove what a run left on this host: (containers, folders)."""
        found = await self._names({"ratchet.run": run})
        boxes = await self._folders_with("ratchet.run", run)
        await self._close_all(found | boxes)
        return len(found), len(boxes)

    async def owned(self) -> list[Owned]:
        """All that this stack has here: its containers, running or not, and folders without one."""
        now = time.time()
        # In this order: one that is taken meanwhile is in both and not in neither.
        folders = await asyncio.to_thread(lambda: self._members.all(now) | self._boxes.all(now))
        return matched(folders, await self._containers.listed(), now)

    async def settled(self) -> None:
        """Wait for the closes that are under way."""
        await self._removals.settled()

    async def aclose(self) -> None:
        """Take the pool away, finish the closes that are under way and let go of the daemon. The sandboxes live on."""
        if self._pool is not None:
            await self._pool.aclose()
        await self._removals.aclose()
        await self._daemon.close()

    # --- starting -------------------------------------------------------------------------------------------------

    async def _take(self, sandbox_id: str, recipe: Recipe, labels: dict[str, str]) -> dict[str, str] | None:
        """The labels of a sandbox of the pool that answers and is this one from now on; None where there is none."""
        if self._pool is None:
            return None
        with named_disk():
            while (taken := await whole(self._pool.take(sandbox_id, recipe, labels))) is not None:
                try:
                    await self._channel(sandbox_id).ready(READY_S)
                except ChannelLost as lost:
                    log.warning("a sandbox of the warm pool does not answer any more: %s", lost)
                    await whole(self._discard(sandbox_id))
                else:
                    return taken
        return None

    async def _start(self, sandbox_id: str, recipe: Recipe, labels: dict[str, str], *, queued: bool) -> str:
        """The container's id, started. A dead one was never handed out alive: it makes room."""
        found = await self._inspect(sandbox_id)
        if found is not None and found["State"]["Status"] not in ("created", "running", "paused"):
            await self._discard(sandbox_id)
            found = None
        async with self._containers.awaited():
            if found is None:
                with named_disk():
                    box = await asyncio.to_thread(self._boxes.make, sandbox_id, labels)
                found = await self._containers.create(sandbox_id, recipe, box, labels, queued=queued)
            if found is None:
                words = "its image or itself was removed meanwhile"
                raise SandboxError(f"container {sandbox_id} was not made: {words}")
            if found["State"]["Status"] == "created":
                await self._containers.start(sandbox_id, queued=queued)
        return str(found["Id"])

    async def _ready(self, sandbox_id: str) -> None:
        """Wait until the first process answers."""
        await self._answered(sandbox_id, until_ready(self._channel(sandbox_id), READY_S))

    # --- finding out ----------------------------------------------------------------------------------------------

    def _channel(self, sandbox_id: str) -> Channel:
        labels = self._boxes.labels(sandbox_id)
        name, box = labels.get(CONTAINER, sandbox_id), self._boxes.box(sandbox_id)
        return self._containers.channel(name, box, labels.get(TRANSPORT, ""))

    async def _answered(self, sandbox_id: str, call: Coroutine[Any, Any, Value]) -> Value:
        try:
            return await call
        except ChannelLost as lost:
            raise await self._autopsy(sandbox_id, lost) from lost

    async def _autopsy(self, sandbox_id: str, lost: ChannelLost) -> SandboxError:
        """Why a sandbox does not answer: gone (final, and whose doing), or only silent (retryable)."""
        until = time.monotonic() + SETTLE_S
        while True:
            found = await self._inspect(sandbox_id)
            gone = SandboxGone("the container was removed") if found is None else cause_of_death(found["State"])
            if gone is not None:
                return gone
            if time.monotonic() > until:
                return SandboxError(f"sandbox {sandbox_id} runs but does not answer: {lost}")
            await asyncio.sleep(0.1)

    async def pid(self, sandbox_id: str) -> int:
        """The first process as this host knows it, 0 where there is none. Raises SandboxError."""
        found = await self._inspect(sandbox_id)
        return int(found["State"]["Pid"]) if found is not None else 0

    async def _inspect(self, sandbox_id: str) -> dict[str, Any] | None:
        return await self._containers.inspect(self._boxes.container(sandbox_id))

    async def _names(self, labels: dict[str, str]) -> set[str]:
        """Ids of the sandboxes that have a container, running or not, and these labels."""
        found = [item for item in await self.owned() if item.container]
        return {item.id for item in found if labels.items() <= item.labels.items()}

    async def _folders_with(self, label: str, value: str) -> set[str]:
        return set(await asyncio.to_thread(self._boxes.having, label, value))

    async def _living(self) -> set[str]:
        return await self._names({"ratchet.kind": "agent"})

    # --- removing -------------------------------------------------------------------------------------------------

    async def _close_all(self, ids: set[str]) -> None:
        """Those that grade first: they are made from what the others left."""
        graders = {one for one in ids if self._boxes.labels(one).get("ratchet.kind") == "grader"}
        for some in (graders, ids - graders):
            await asyncio.gather(*(self.close(sandbox_id) for sandbox_id in sorted(some)))

    async def _close(self, sandbox_id: str) -> None:
        if sandbox_id.startswith(PREFIX):
            if await asyncio.to_thread(self._members.retire, sandbox_id):
                await self._containers.remove(sandbox_id)
                await asyncio.to_thread(self._members.forget, sandbox_id)
            return
        await self._discard(sandbox_id)
        self._locks.pop(sandbox_id, None)
        await self._slots.free(sandbox_id)

    async def _discard(self, sandbox_id: str) -> None:
        for service in self._boxes.services(sandbox_id).values():
            await self._discard(service)
        container = self._boxes.container(sandbox_id)
        await self._containers.remove(container)
        if MACHINE in self._boxes.labels(sandbox_id):
            # A grading that was cut short leaves what it was to grade.
            await forget(self._daemon, container)
        await asyncio.to_thread(shutil.rmtree, self.state / GRADING / sandbox_id, True)
        await asyncio.to_thread(self._boxes.remove, sandbox_id)
