"""How much of the host's disk a machine may take: what it wrote is measured while something runs in it, and after.

Docker has no limit of its own for that on most file systems. Owns the measuring; what goes over the bound is ended, and
the machine counts as broken by whoever runs there. Called by `SandboxActivities` and `Examiner`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from activities.sandbox.daemon import Daemon, tolerated
from activities.sandbox.docker import DockerBackend
from workflows.errors import SandboxError

LOOK_S = 2.0
"""Between two looks; longer where a look itself takes long."""
SHARE = 0.1
"""Of the time that looking may take."""


class Storage:
    """Of one machine; `folders` are those of the host that it can write to, `services` the storage of those beside it.
    `most_mb` 0: a native sandbox, which has no place on the disk."""

    def __init__(
        self,
        backend: DockerBackend,
        sandbox_id: str,
        most_mb: int,
        folders: list[Path],
        services: dict[str, Storage] | None = None,
    ) -> None:
        self._backend = backend
        self._sandbox_id = sandbox_id
        self._most_mb = most_mb
        self._folders = folders
        self._services = services or {}

    async def full(self) -> str:
        """Why it can't be used any more, in words; empty while it can. Raises SandboxError."""
        for name, storage in self._services.items():
            if full := await storage.full():
                return f"the service {name}: {full}"
        if not self._most_mb:
            return ""
        container = self._backend.boxes.container(self._sandbox_id)
        size = await written(self._backend.daemon, container) + await asyncio.to_thread(self._in_folders)
        if size <= self._most_mb << 20:
            return ""
        return f"its disk is full: {size >> 20} MB of {self._most_mb} MB"

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """End what runs within the block once it has written too much."""
        if not self._most_mb:
            yield
            return
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        pause_s = LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            with suppress(SandboxError):
                if await self.full():
                    for sandbox_id in (self._sandbox_id, *(one._sandbox_id for one in self._services.values())):
                        await self._backend.kill_agent(sandbox_id)
            pause_s = max(LOOK_S, (time.monotonic() - began) / SHARE)

    def _in_folders(self) -> int:
        return sum(_size(folder) for folder in self._folders)


async def written(daemon: Daemon, container: str) -> int:
    """Bytes that differ from its image; 0 where there is no container."""
    with tolerated(404):
        shown = await daemon.call(
            "size", lambda client: client.containers.container(container).show(size=1), queued=False
        )
        return int(shown.get("SizeRw") or 0)
    return 0


def _size(folder: Path) -> int:
    """Of the files in a folder and below, none of them opened."""
    total = 0
    with suppress(OSError):
        for path in folder.rglob("*"):
            with suppress(OSError):
                total += path.lstat().st_blocks * 512
    return total
