"""Removals that nobody waits for: begun, tried again while the daemon is away, and waited for when the worker ends.

Owns their tasks; what they remove is `DockerBackend`'s. One that fails for good is the janitor's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from workflows.errors import SandboxError

log = logging.getLogger(__name__)

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 60.0)
"""Between the tries of one that has to happen."""


class Removals:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = asyncio.Event()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Whoever wants to may wait for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def insist(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin it, and again while it fails and this process does not end."""
        self.begin(self._again(what, work))

    async def settled(self) -> None:
        """Wait until none is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Wait for the tries that are under way; there is no further one."""
        self._ends.set()
        await self.settled()

    async def _again(self, what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        for pause_s in PAUSES_S:
            try:
                return await work()
            except SandboxError as error:
                log.warning("%s can't be removed yet: %s", what, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), pause_s)
                return
        await work()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a sandbox is left to the janitor: %s", error)
