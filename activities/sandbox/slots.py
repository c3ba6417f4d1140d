"""How many sandboxes may live at once on this host.

The daemon is the only truth: the count is read from it, so a restarted or a second worker agrees. Called by
`DockerBackend`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from workflows.errors import SandboxError

WAIT_S = 60.0
"""Longest wait inside one try; Temporal's retry goes on from there."""
LOOK_S = 2.0


class Slots:
    def __init__(self, most: int, living: Callable[[], Awaitable[set[str]]]) -> None:
        self._most = most
        self._living = living
        self._held: set[str] = set()
        self._starting: set[str] = set()
        self._changed = asyncio.Condition()
        self._looked = float("-inf")

    async def take(self, sandbox_id: str) -> float:
        """Wait for a free slot; seconds waited. Raises SandboxError (retryable) when none frees itself."""
        began = time.monotonic()
        async with self._changed:
            await self._look(began)
            while sandbox_id not in self._held and len(self._held) >= self._most:
                if time.monotonic() - began > WAIT_S:
                    raise SandboxError(f"all {self._most} sandboxes of this host are in use")
                try:
                    await asyncio.wait_for(self._changed.wait(), LOOK_S)
                except TimeoutError:
                    await self._look(time.monotonic())
            self._held.add(sandbox_id)
            self._starting.add(sandbox_id)
        return time.monotonic() - began

    def started(self, sandbox_id: str) -> None:
        """From now on the daemon knows it, or it failed to start."""
        self._starting.discard(sandbox_id)

    async def free(self, sandbox_id: str) -> None:
        async with self._changed:
            self._held.discard(sandbox_id)
            self._starting.discard(sandbox_id)
            self._changed.notify_all()

    async def _look(self, now: float) -> None:
        """Take the daemon's word, at most every `LOOK_S`."""
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._held = await self._living() | self._starting
