"""Sandboxes as Docker containers on this host.

Owns their life: start, find again, run commands in, tell why one is gone, remove. Promises: one container per attempt
and kind whatever is retried (its name is derived from them), a command at most once per key, an idempotent close, and
that the daemon's absence is retryable while a container's loss is final. Called by `SandboxActivities`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from activities.sandbox.boxes import Boxes
from activities.sandbox.cgroup import cgroup_parent, raise_share
from activities.sandbox.channel import Channel, ChannelLost, Operation, Result, SocketChannel, journaled
from activities.sandbox.container import Mounts, SandboxSpec, create_config
from activities.sandbox.daemon import Daemon, containers_of, tolerated
from activities.sandbox.evidence import SandboxGone, cause_of_death
from activities.sandbox.exec_channel import ExecChannel
from activities.sandbox.image import ensure_image
from activities.sandbox.slots import Slots
from activities.sandbox.toolbox import build_toolbox, has_sbxd
from workflows.errors import SandboxError

Value = TypeVar("Value")

READY_S = 10.0
SETTLE_S = 2.0
"""How long the daemon may take to notice that a container ended."""


@dataclass(frozen=True)
class Sandbox:
    id: str
    container_id: str
    image_id: str
    waited_s: float
    """Seconds it waited for a free slot."""


class DockerBackend:
    """`docker_host` empty is the local socket; `state_dir` holds the toolbox and one folder per sandbox; at most
    `slots` agents' sandboxes live at once. `use_sbxd` False takes `docker exec` for every command."""

    def __init__(self, docker_host: str, state_dir: Path, slots: int, *, use_sbxd: bool = True) -> None:
        self._state = state_dir.resolve()
        self._stack = hashlib.sha256(str(self._state).encode()).hexdigest()[:12]
        self._daemon = Daemon(docker_host)
        self._boxes = Boxes(self._state / "sandboxes")
        self._slots = Slots(slots, self._living)
        self._use_sbxd = use_sbxd
        self._locks: dict[str, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[Any]] = set()
        self._toolbox: Path | None = None
        self._images: dict[str, str] = {}
        self._cgroup: str | None = None

    def id_of(self, attempt: str, kind: str = "agent") -> str:
        """The sandbox id of an attempt, which is its container's name: the same in every process of this stack."""
        return "ratchet-" + hashlib.sha256(f"{self._stack}|{attempt}|{kind}".encode()).hexdigest()[:20]

    async def acquire(self, spec: SandboxSpec, labels: dict[str, str]) -> Sandbox:
        """A running sandbox for `labels["attempt"]` and `labels["kind"]` (`agent` or `verifier`), the one of an earlier
        try where there is one. Raises SandboxError, InvalidConfig for an unknown image."""
        sandbox_id = self.id_of(labels["attempt"], labels.get("kind", "agent"))
        # A verifier's sandbox serves one that holds a slot already; waiting for another could wait for ever.
        waited = await self._slots.take(sandbox_id) if labels.get("kind", "agent") == "agent" else 0.0
        try:
            async with self._locks.setdefault(sandbox_id, asyncio.Lock()):
                container_id, image_id = await _whole(self._start(sandbox_id, spec, labels))
                await self._ready(sandbox_id)
        finally:
            self._slots.started(sandbox_id)
        return Sandbox(sandbox_id, container_id, image_id, waited)

    async def run(self, sandbox_id: str, op: Operation) -> Result:
        """Raises SandboxGone (final) when there is no sandbox any more, SandboxError when it can't be reached."""
        try:
            return await self._channel(sandbox_id).run(op)
        except ChannelLost as lost:
            if found := journaled(self._boxes.box(sandbox_id), op.op_id):
                return found
            raise await self._autopsy(sandbox_id, lost) from lost

    async def ask(self, sandbox_id: str, op_id: str, wait_s: float) -> Result | None:
        """The result of a key, None where it was never started. Raises as `run`."""
        return await self._answered(sandbox_id, self._channel(sandbox_id).ask(op_id, wait_s))

    async def kill_agent(self, sandbox_id: str) -> None:
        """Kill every process that the agent left. Raises as `run`."""
        await self._answered(sandbox_id, self._channel(sandbox_id).kill_agent())

    async def close(self, sandbox_id: str) -> None:
        """Remove the container and its folder. Idempotent; goes on when the caller is cancelled."""
        task = asyncio.ensure_future(self._close(sandbox_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        await asyncio.shield(task)

    async def close_attempt(self, attempt: str) -> None:
        """Remove whatever an attempt has here, also what a lost try of `acquire` made."""
        found = await self._names({"ratchet.attempt": attempt})
        ids = found | {self.id_of(attempt), self.id_of(attempt, "verifier")}
        await asyncio.gather(*(self.close(sandbox_id) for sandbox_id in sorted(ids)))

    async def sweep(self, run: str) -> tuple[int, int]:
        """Remove what a run left on this host: (containers, folders)."""
        found = await self._names({"ratchet.run": run})
        boxes = set(self._boxes.having("ratchet.run", run))
        await asyncio.gather(*(self.close(sandbox_id) for sandbox_id in sorted(found | boxes)))
        return len(found), len(boxes)

    async def aclose(self) -> None:
        """Finish the closes that are under way and let go of the daemon. The sandboxes live on."""
        if self._closing:
            await asyncio.wait(self._closing)
        await self._daemon.close()

    # --- starting -------------------------------------------------------------------------------------------------

    async def _start(self, sandbox_id: str, spec: SandboxSpec, labels: dict[str, str]) -> tuple[str, str]:
        """(container id, image id), started. A dead one of this name was never handed out alive: it makes room."""
        found = await self._inspect(sandbox_id)
        if found is not None and found["State"]["Status"] not in ("created", "running", "paused"):
            await self._remove(sandbox_id)
            found = None
        if found is None:
            found = await self._create(sandbox_id, spec, labels)
        if found is None:
            self._images.pop(spec.image, None)
            raise SandboxError(f"container {sandbox_id} was not made: its image or itself was removed meanwhile")
        if found["State"]["Status"] == "created":
            await self._daemon.call(
                "start", lambda client: client.containers.container(sandbox_id).start(), create=True
            )
            await asyncio.to_thread(raise_share, self._cgroup or "")
        return str(found["Id"]), str(found["Image"])

    async def _create(self, sandbox_id: str, spec: SandboxSpec, labels: dict[str, str]) -> dict[str, Any] | None:
        tools = await self._tools()
        sbxd = self._use_sbxd and has_sbxd(tools)
        all_labels = {f"ratchet.{name}": value for name, value in labels.items()} | {
            "ratchet.stack": self._stack,
            "ratchet.transport": "sbxd" if sbxd else "exec",
        }
        if spec.image not in self._images:
            self._images[spec.image] = await ensure_image(self._daemon, spec.image)
        if self._cgroup is None:
            self._cgroup = cgroup_parent(await self._daemon.call("info", lambda client: client.system.info()))
        box = await asyncio.to_thread(self._boxes.make, sandbox_id, all_labels)
        config = create_config(
            spec,
            image_id=self._images[spec.image],
            mounts=Mounts(tools, box),
            labels=all_labels,
            sbxd=sbxd,
            cgroup_parent=self._cgroup,
        )
        with tolerated(404, 409):  # the image was pruned; made by a try whose answer was lost
            await self._daemon.call(
                "create", lambda client: client.containers.create(config, name=sandbox_id), create=True
            )
        return await self._inspect(sandbox_id)

    async def _ready(self, sandbox_id: str) -> None:
        """Wait until the first process answers."""
        until = time.monotonic() + READY_S
        while True:
            try:
                return await self._channel(sandbox_id).ready()
            except ChannelLost as lost:
                if time.monotonic() > until:
                    raise await self._autopsy(sandbox_id, lost) from lost
                await asyncio.sleep(0.005)

    async def _tools(self) -> Path:
        if self._toolbox is None:
            self._toolbox = await asyncio.to_thread(build_toolbox, self._state / "toolbox")
        return self._toolbox

    # --- finding out ----------------------------------------------------------------------------------------------

    def _channel(self, sandbox_id: str) -> Channel:
        if self._boxes.labels(sandbox_id).get("ratchet.transport") == "exec":
            return ExecChannel(self._daemon, sandbox_id, self._boxes.box(sandbox_id))
        return SocketChannel(self._boxes.box(sandbox_id))

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

    async def _inspect(self, sandbox_id: str) -> dict[str, Any] | None:
        with tolerated(404):
            found: dict[str, Any] = await self._daemon.call(
                "inspect", lambda client: client.containers.container(sandbox_id).show()
            )
            return found
        return None

    async def _names(self, labels: dict[str, str]) -> set[str]:
        found = await containers_of(self._daemon, labels | {"ratchet.stack": self._stack})
        return {name.removeprefix("/") for item in found for name in item["Names"]}

    async def _living(self) -> set[str]:
        return await self._names({"ratchet.kind": "agent"})

    # --- removing -------------------------------------------------------------------------------------------------

    async def _close(self, sandbox_id: str) -> None:
        await self._remove(sandbox_id)
        await asyncio.to_thread(self._boxes.remove, sandbox_id)
        self._locks.pop(sandbox_id, None)
        await self._slots.free(sandbox_id)

    async def _remove(self, sandbox_id: str) -> None:
        with tolerated(404, 409):  # gone, or on its way out
            await self._daemon.call(
                "remove", lambda client: client.containers.container(sandbox_id).delete(force=True, v=True)
            )
        until = time.monotonic() + READY_S
        while await self._inspect(sandbox_id) is not None:
            if time.monotonic() > until:
                raise SandboxError(f"container {sandbox_id} can't be removed")
            await asyncio.sleep(0.1)


async def _whole(work: Coroutine[Any, Any, Value]) -> Value:
    """Finish `work` before a cancellation goes on: what the daemon was asked for is then there to be removed."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
