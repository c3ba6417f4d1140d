"""What a sandbox host does by itself: takes new sandboxes as its door lets it, says how it stands, and clears away.

It clears away when it starts, whatever no running episode has any more, as after a crash of the whole host whose
episodes went on elsewhere; then every few minutes, without the janitor's schedule having to know it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from temporalio.service import RPCError
from temporalio.worker import FixedSizeSlotSupplier, WorkerTuner

from activities.janitor.host import HostJanitorActivities
from activities.sandbox.hosts import POLLS, Door, HostActivities
from workflows.contracts import JanitorInput
from workflows.errors import SandboxError

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 300.0
TELL_EVERY_S = 2.0
RETRY_S = 5.0
AT_START = JanitorInput(sandbox_grace_s=0)


def acquiring(door: Door) -> dict[str, Any]:
    """Options of the worker that polls the queue of all hosts."""
    rest = FixedSizeSlotSupplier(1)
    tuner = WorkerTuner.create_composite(
        workflow_supplier=rest, activity_supplier=door, local_activity_supplier=rest, nexus_supplier=rest
    )
    return {"tuner": tuner, "max_concurrent_activity_task_polls": POLLS, "disable_eager_activity_execution": True}


class HostKeeper:
    """`told` is the file in which it says how it stands, for `ratchet status` on this machine."""

    def __init__(self, host: HostActivities, janitor: HostJanitorActivities, told: Path) -> None:
        self._host = host
        self._janitor = janitor
        self._told = told
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> HostKeeper:
        self._tasks = [asyncio.create_task(self._sweep()), asyncio.create_task(self._tell())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(OSError):
            self._told.unlink(missing_ok=True)

    async def _sweep(self) -> None:
        limits = AT_START
        while True:
            try:
                swept = await self._janitor.sweep_host(limits)
            except (SandboxError, RPCError) as error:
                log.warning("can't clear away yet: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            if swept.removed or swept.errors:
                log.info("cleared away: %s %s", swept.removed, "; ".join(swept.errors))
            limits = JanitorInput()
            await asyncio.sleep(SWEEP_EVERY_S)

    async def _tell(self) -> None:
        while True:
            try:
                words = (await self._host.status()).words
            except SandboxError as error:
                words = str(error)
            with suppress(OSError):
                self._told.write_text(words)
            await asyncio.sleep(TELL_EVERY_S)
