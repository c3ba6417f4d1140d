"""Containers by name: created, started, inspected, listed, removed.

Owns what a container is made from (image, flags, tools, folder) and the labels that say whose stack it is of; knows
nothing of attempts. Promises that every method can be tried again after any of them was cut short, and that whoever
starts a container for somebody who waits goes before the one who fills the pool. Called by `DockerBackend` and
`WarmPool`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from activities.sandbox.boxes import named_disk
from activities.sandbox.cgroup import cgroup_parent, raise_share
from activities.sandbox.channel import Channel, SocketChannel
from activities.sandbox.container import Mounts, SandboxSpec, create_config
from activities.sandbox.daemon import Daemon, Refused, containers_of, tolerated
from activities.sandbox.exec_channel import ExecChannel
from activities.sandbox.image import ensure_image
from activities.sandbox.toolbox import build_toolbox, has_sbxd
from workflows.errors import SandboxError

GONE_S = 10.0
"""How long a container may take to vanish after it was removed."""
TRANSPORT = "ratchet.transport"
MACHINE = "ratchet.machine"
"""Label of those that have a whole machine of a task's own."""


@dataclass(frozen=True)
class Recipe:
    """All that makes one container like another, but its name, its folder and its labels."""

    spec: SandboxSpec
    image_id: str
    tools: Path
    sbxd: bool
    cgroup: str
    namespace: str

    @property
    def key(self) -> str:
        """The same for containers of which one may take the other's place."""
        config = create_config(
            replace(self.spec, image=""),
            image_id=self.image_id,
            mounts=Mounts(self.tools, Path("box")),
            labels={"namespace": self.namespace},
            sbxd=self.sbxd,
            cgroup_parent=self.cgroup,
        )
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def contents(self) -> dict[str, Any]:
        """What a program that runs in it can tell from it."""
        return asdict(replace(self.spec, image=self.image_id, beside="")) | {"tools": self.tools.name}


@dataclass(frozen=True)
class Sandbox:
    id: str
    container_id: str
    recipe: Recipe
    warm: bool
    """It had been started before it was asked for."""
    found: bool
    """An earlier try made or took it, and may have run something in it."""
    waited_s: float
    """Seconds it waited for a free slot."""

    @property
    def image_id(self) -> str:
        return self.recipe.image_id


class Containers:
    """`stack` tells this state folder's containers from others' on the same daemon."""

    def __init__(self, daemon: Daemon, state: Path, stack: str, *, use_sbxd: bool, parent: str, namespace: str) -> None:
        self._daemon = daemon
        self._state = state
        self._stack = stack
        self._use_sbxd = use_sbxd
        self._parent = parent
        self._namespace = namespace
        self._images: dict[str, str] = {}
        self._toolbox: Path | None = None
        self._building = asyncio.Lock()
        self._cgroup: str | None = None
        self._runtimes: set[str] = set()
        self._awaited = 0
        self._calm = asyncio.Event()
        self._calm.set()

    async def recipe(self, spec: SandboxSpec) -> Recipe:
        """How to make it here. Raises SandboxError, final for a runtime that the daemon has not; InvalidConfig for an
        unknown image."""
        tools = await self.tools()
        image_id = self._images.get(spec.image) or await ensure_image(self._daemon, spec.image)
        if image_id != spec.image:
            self._images[spec.image] = image_id
        if self._cgroup is None:
            info = await self._daemon.call("info", lambda client: client.system.info())
            self._cgroup = cgroup_parent(info, self._parent)
            self._runtimes = set(info.get("Runtimes") or {})
        if spec.runtime and spec.runtime not in self._runtimes:
            there = ", ".join(sorted(self._runtimes)) or "none by name"
            raise SandboxError(
                f"this host's Docker has no runtime {spec.runtime!r} (sandbox.runtime of the run); it has: {there}."
                ' Add it to "runtimes" of its daemon.json',
                retryable=False,
            )
        sbxd = self._use_sbxd and has_sbxd(tools)
        return Recipe(spec, image_id, tools, sbxd, self._cgroup, self._namespace)

    def labels(self, recipe: Recipe, labels: dict[str, str]) -> dict[str, str]:
        return (
            {f"ratchet.{name}": value for name, value in labels.items()}
            | {
                "ratchet.stack": self._stack,
                "ratchet.namespace": self._namespace,
                TRANSPORT: "sbxd" if recipe.sbxd else "exec",
            }
            | ({MACHINE: "yes"} if recipe.spec.machine else {})
        )

    async def create(
        self, name: str, recipe: Recipe, box: Path, labels: dict[str, str], *, queued: bool = True
    ) -> dict[str, Any] | None:
        """The container as the daemon describes it; None where its image or itself was removed meanwhile."""
        config = create_config(
            recipe.spec,
            image_id=recipe.image_id,
            mounts=Mounts(recipe.tools, box),
            labels=labels,
            sbxd=recipe.sbxd,
            cgroup_parent=recipe.cgroup,
        )
        with tolerated(404, 409):  # the image was pruned; made by a try whose answer was lost
            await self._daemon.call(
                "create",
                lambda client: client.containers.create(config, name=name),
                create=True,
                queued=queued,
            )
        if (found := await self.inspect(name)) is None:
            self._images.pop(recipe.spec.image, None)
        return found

    async def start(self, name: str, *, queued: bool = True) -> None:
        """Start one that was created. Raises Refused; the container is then gone."""
        try:
            await self._daemon.call(
                "start", lambda client: client.containers.container(name).start(), create=True, queued=queued
            )
        except Refused:
            # One that a dying daemon left half started is refused for ever: the retry makes another.
            await self.remove(name)
            raise
        await asyncio.to_thread(raise_share, self._cgroup or "")

    async def inspect(self, name: str) -> dict[str, Any] | None:
        with tolerated(404):
            found: dict[str, Any] = await self._daemon.call(
                "inspect", lambda client: client.containers.container(name).show()
            )
            return found
        return None

    async def listed(self) -> dict[str, dict[str, Any]]:
        """All of this stack, running or not, by name, as the daemon lists them."""
        found = await containers_of(self._daemon, {"ratchet.stack": self._stack})
        return {item["Names"][0].removeprefix("/") if item["Names"] else str(item["Id"]): item for item in found}

    async def remove(self, name: str) -> None:
        """Idempotent. Raises SandboxError where it stays."""
        with tolerated(404, 409):  # gone, or on its way out
            await self._daemon.call(
                "remove", lambda client: client.containers.container(name).delete(force=True, v=True)
            )
        until = time.monotonic() + GONE_S
        while await self.inspect(name) is not None:
            if time.monotonic() > until:
                raise SandboxError(f"container {name} can't be removed")
            await asyncio.sleep(0.1)

    def channel(self, name: str, box: Path, transport: str) -> Channel:
        """The way to the container of that name, whose folder is `box`."""
        return ExecChannel(self._daemon, name, box) if transport == "exec" else SocketChannel(box)

    async def tools(self) -> Path:
        async with self._building:
            if self._toolbox is None:
                with named_disk():
                    self._toolbox = await asyncio.to_thread(build_toolbox, self._state / "toolbox")
            return self._toolbox

    @asynccontextmanager
    async def awaited(self) -> AsyncIterator[None]:
        """Somebody waits for the container that is started within the block."""
        self._awaited += 1
        self._calm.clear()
        try:
            yield
        finally:
            self._awaited -= 1
            if not self._awaited:
                self._calm.set()

    async def calm(self) -> None:
        """Wait until nobody waits for a container to start."""
        await self._calm.wait()
