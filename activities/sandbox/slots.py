"""How many sandboxes may live at once on this host.

The count is read from the host, so a restarted or a second worker agrees: from the sandboxes' folders, of which there
are never fewer than sandboxes, and where those leave no room from the daemon. Called by `DockerBackend`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

LOOK_S = 2.0


class Slots:
    """`perhaps` are the sandboxes that may be living, cheap to ask for; `living` are those that do."""

    def __init__(
        self, most: int, perhaps: Callable[[], Awaitable[set[str]]], living: Callable[[], Awaitable[set[str]]]
    ) -> None:
        self._most = most
        self._perhaps = perhaps
        self._living = living
        self._held: set[str] = set()
        self._starting: set[str] = set()
        self._changed = asyncio.Condition()
        self._looked = float("-inf")

    async def take(self, sandbox_id: str) -> float:
        """Wait for a free slot, however long that takes: a queue is nobody's failure. Seconds waited."""
        began = time.monotonic()
        async with self._changed:
            await self._look(began)
            while sandbox_id not in self._held and len(self._held) >= self._most:
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    await self._look(time.monotonic())
            self._held.add(sandbox_id)
            self._starting.add(sandbox_id)
        return time.monotonic() - began

    def started(self, sandbox_id: str) -> None:
        """From now on the daemon knows it, or it failed to start."""
        self._starting.discard(sandbox_id)

    async def held(self) -> set[str]:
        """The sandboxes that have a slot, or start in one. Raises what `perhaps` and `living` do."""
        async with self._changed:
            await self._look(time.monotonic())
            return set(self._held)

    async def free(self, sandbox_id: str) -> None:
        async with self._changed:
            self._held.discard(sandbox_id)
            self._starting.discard(sandbox_id)
            self._changed.notify_all()

    async def _look(self, now: float) -> None:
        """Count afresh, at most every `LOOK_S`."""
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._held = await self._perhaps() | self._starting
            if len(self._held) >= self._most:
                self._held = await self._living() | self._starting
