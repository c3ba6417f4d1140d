"""The janitor's part on a host: sandboxes whose episode is over, snapshots that nobody uses, and temporary files of
processes that died.

Owns nothing; asks the daemon what is there, then Temporal whose it is. Promises: what a live attempt has stays, also
one that was acquired a moment ago, and so does what was made for another namespace; one sandbox that can't be removed
keeps no other; where the namespace does not answer, nothing goes. Called by the Janitor workflow.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

from temporalio import activity

from activities.janitor.rules import due, reason_to_remove
from activities.sandbox.docker import DockerBackend
from activities.sandbox.owned import Owned
from activities.sandbox.snapshots import Snapshots
from activities.training.transit import sweep_transit
from workflows.contracts import JanitorInput, Swept
from workflows.errors import SandboxError

MOST = 500
"""Sandboxes of one pass; the next takes the rest."""
AT_ONCE = 8
TEMPORARY = ("*.part", "*.part.*", "weights/*/*.part*", "toolbox/building-*")
"""Files and folders below the state folder that are renamed when they are whole."""


class HostJanitorActivities:
    """`backend` None: no sandbox lives here; `ending` says how a workflow closed, empty while it runs; `namespace` is
    the one that it asks; `home` is the state folder."""

    def __init__(
        self,
        backend: DockerBackend | None,
        ending: Callable[[str], Awaitable[str]],
        home: Path,
        *,
        namespace: Callable[[], Awaitable[str]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._ending = ending
        self._home = home
        self._namespace = namespace
        self._now = now
        self._at_once = asyncio.Semaphore(AT_ONCE)

    @activity.defn(name="sweep_host")
    async def sweep_host(self, limits: JanitorInput) -> Swept:
        """Temporary files and unused snapshots, then sandboxes. Raises SandboxError where the daemon does not answer,
        RPCError where the namespace is not there."""
        namespace = await self._namespace()
        files = await asyncio.to_thread(self._sweep_files, self._now() - limits.unowned_grace_s)
        snapshots = await asyncio.to_thread(Snapshots(self._home / "snapshots").sweep)
        backend = self._backend
        removed, errors = await self._sweep_sandboxes(backend, limits, namespace) if backend else (Counter[str](), [])
        return Swept.together(
            [Swept(removed={"temporary": files, "snapshots": snapshots}), Swept(removed=removed, errors=errors)]
        )

    async def _sweep_sandboxes(
        self, backend: DockerBackend, limits: JanitorInput, namespace: str
    ) -> tuple[Counter[str], list[str]]:
        ours = [item for item in await backend.owned() if item.namespace in ("", namespace)]
        candidates = due(ours, limits)[:MOST]
        attempts = sorted({item.attempt for item in candidates if item.attempt})
        found = await asyncio.gather(*(self._asked(attempt) for attempt in attempts))
        endings = dict(zip(attempts, found, strict=True))
        to_go = [(item, reason) for item in candidates if (reason := reason_to_remove(item, endings))]
        failures = await asyncio.gather(*(self._remove(backend, item) for item, _ in to_go))
        names = [f"{'containers' if item.container else 'folders'}/{reason}" for item, reason in to_go]
        done = Counter(name for name, failure in zip(names, failures, strict=True) if not failure)
        return done, [failure for failure in failures if failure]

    async def _asked(self, attempt: str) -> str:
        async with self._at_once:
            return await self._ending(attempt)

    async def _remove(self, backend: DockerBackend, item: Owned) -> str:
        """Why it could not be removed; empty when it is gone."""
        async with self._at_once:
            try:
                await backend.close(item.id)
            except SandboxError as error:
                return f"{item.id}: {error}"
        return ""

    def _sweep_files(self, before: float) -> int:
        count = sweep_transit(self._home / "spool")
        for path in self._temporary():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    count += 1
        return count

    def _temporary(self) -> Iterator[Path]:
        for pattern in TEMPORARY:
            yield from self._home.glob(pattern)
