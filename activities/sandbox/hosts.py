"""One of several sandbox hosts: it takes a sandbox only where it has room for one, and drains when it is told to.

Owns the door of this host: how many polls of the shared queue may be open, which is never more than there is room for,
and fewer the fuller the host is, so that an acquire goes where most is free. Promises: what is handed to this host
while it drains, or while its daemon fails, is handed back; draining outlives the worker and the machine (it is a file);
what lives here goes on to its end. Called by the role `sandbox`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.worker import (
    CustomSlotSupplier,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
)

from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from workflows.contracts import AcquireInput, AcquireOutput, FailureType, HostInput, HostStatus
from workflows.errors import SandboxError

log = logging.getLogger(__name__)

DRAIN_FILE = "sandbox-drain"
"""Below the state folder: while it is there, the host takes no new sandbox."""
POLLS = 5
"""Open at most, on an empty host."""
LOOK_S = 0.2
REST_S = 2.0
"""For how long a host takes none after its daemon failed; doubles up to `LONGEST_REST_S` while it does."""
LONGEST_REST_S = 60.0
HANDED_BACK = timedelta(milliseconds=200)


def polls_for(free: int, slots: int) -> int:
    """Open polls of a host with `free` of `slots`. Example: polls_for(4, 16) == 2."""
    return min(free, math.ceil(POLLS * free / slots)) if free > 0 else 0


class Door(CustomSlotSupplier):
    """Permits to take a sandbox, of which each is a poll until it is used. The SDK calls some methods from threads of
    its own."""

    def __init__(
        self, backend: DockerBackend, drain_file: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._drain_file = drain_file
        self._clock = clock
        self._lock = threading.Lock()
        self._reserved = 0
        self._coming: set[str] = set()
        self._failures = 0
        self._rests_until = float("-inf")
        self.trouble = ""
        """Why it takes none although it has room; empty while it does."""

    @property
    def draining(self) -> bool:
        return self._drain_file.exists()

    def drain(self, wanted: bool) -> None:
        """Raises SandboxError where the state folder can't be written."""
        try:
            self._drain_file.touch() if wanted else self._drain_file.unlink(missing_ok=True)
        except OSError as error:
            raise SandboxError(f"{self._drain_file} can't be written: {error}", retryable=False) from error

    @property
    def shut(self) -> str:
        """Why nothing is taken now; empty where there may be room."""
        if self.draining:
            return "it drains"
        return self.trouble if self._clock() < self._rests_until else ""

    async def room(self) -> int:
        """Polls that may be opened beside those that are."""
        if self.shut:
            return 0
        living = await self._backend.living()
        with self._lock:
            open_polls = self._reserved - len(self._coming)
            return polls_for(self._backend.slots - len(living | self._coming), self._backend.slots) - open_polls

    # --- the SDK's side -------------------------------------------------------------------------------------------

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        while True:
            try:
                if await self.room() > 0:
                    with self._lock:
                        self._reserved += 1
                    return SlotPermit()
            except SandboxError as error:
                self.failed(error)
            await asyncio.sleep(LOOK_S)

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        return None

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        """It stays counted: from its activity's beginning among those that come."""

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        with self._lock:
            self._reserved -= 1

    # --- the activities' side -------------------------------------------------------------------------------------

    def comes(self, sandbox_id: str) -> None:
        with self._lock:
            self._coming.add(sandbox_id)

    def came(self, sandbox_id: str) -> None:
        with self._lock:
            self._coming.discard(sandbox_id)

    def failed(self, error: SandboxError) -> None:
        """The daemon, or the disk, does not do its work: a host that fails fast must not draw all acquires to it."""
        self._failures += 1
        rest_s = min(LONGEST_REST_S, REST_S * 2.0 ** (self._failures - 1))
        self._rests_until = self._clock() + rest_s
        self.trouble = str(error)[:200]
        log.warning("takes no sandbox for %.0f s: %s", rest_s, error)

    def succeeded(self) -> None:
        self._failures, self.trouble = 0, ""


class HostActivities:
    """What the shared queue and this host's own are served with beside the calls on its sandboxes."""

    def __init__(self, sandboxes: SandboxActivities, backend: DockerBackend, door: Door, host: str) -> None:
        self._sandboxes = sandboxes
        self._backend = backend
        self._door = door
        self._host = host

    @activity.defn(name="acquire")
    async def acquire(self, input: AcquireInput) -> AcquireOutput:
        """As SandboxActivities.acquire, on this host if its door is open; handed back if it is not. One that nobody
        waits for any more leaves nothing. Raises SandboxError, which names the host."""
        if why := self._door.shut:
            raise ApplicationError(
                f"host {self._host} hands it back: {why}", type=FailureType.SANDBOX, next_retry_delay=HANDED_BACK
            )
        sandbox_id = self._backend.id_of(input.attempt_id, generation=input.generation)
        self._door.comes(sandbox_id)
        try:
            out = await self._sandboxes.acquire(input)
        except SandboxError as error:
            if error.retryable:
                self._door.failed(error)
            # The next try may be another host's: none of this one's is left.
            await self._backend.release_attempt(input.attempt_id)
            raise SandboxError(
                f"host {self._host}: {error}", retryable=error.retryable, evidence=error.evidence
            ) from error
        except asyncio.CancelledError:
            await asyncio.shield(self._backend.release_attempt(input.attempt_id))
            raise
        finally:
            self._door.came(sandbox_id)
        self._door.succeeded()
        return out

    @activity.defn(name="host")
    async def host(self, input: HostInput) -> HostStatus:
        """Drain, or take sandboxes again, where that is asked; how the host stands. Raises SandboxError."""
        if input.drain is not None:
            self._door.drain(input.drain)
            log.warning("drains" if input.drain else "takes sandboxes again")
        return await self.status()

    async def status(self) -> HostStatus:
        """Raises SandboxError."""
        living = await self._backend.living()
        return HostStatus(
            host=self._host,
            slots=self._backend.slots,
            used=len(living),
            waiting=sum(self._backend.waiting().values()),
            draining=self._door.draining,
            trouble=self._door.trouble,
        )
