"""What a killed worker had in hand is tried again at once, not when its heartbeat time-out has passed.

Each activity that runs has a note on this host, with its task token. A worker that starts reads the notes of dead
processes of its role and tells the server that those attempts failed; their retries come back with the next poll. A
token names one attempt, so a note that is out of date is refused by the server and harms nothing. Without the notes
(another host, a lost disk) the time-outs decide as ever.

`Notes` is used by the workers' interceptor, `hand_over` by whoever starts a worker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from workflows.contracts import FailureType

log = logging.getLogger(__name__)
PATIENCE = timedelta(seconds=5)
AT_ONCE = 32


class Notes:
    """The notes of this process in `folder`. A note that can't be written costs its activity nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prefix = f"{os.getpid()}-{started_at(os.getpid())}"
        self._numbers = itertools.count()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def of(self, token: bytes) -> Iterator[None]:
        """A note for as long as the activity with this task token runs."""
        path = self._folder / f"{self._prefix}-{next(self._numbers)}"
        with suppress(OSError):
            path.write_bytes(token)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()


def started_at(pid: int) -> int:
    """When a process began, in clock ticks since the boot; -1 where there is none. A pid alone may be another's now."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(text.rpartition(")")[2].split()[19])


def left_behind(folder: Path) -> list[Path]:
    """Notes of processes that are dead."""
    found = []
    for path in folder.glob("*"):
        name = re.fullmatch(r"(\d+)-(\d+)-\d+", path.name)
        if name and started_at(int(name[1])) != int(name[2]):
            found.append(path)
    return found


async def hand_over(client: Client, folder: Path) -> int:
    """Fail the attempts of dead processes, so that they are tried again; how many the server took. Never raises."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(path: Path) -> bool:
        async with limit:
            taken = False
            with suppress(OSError, RPCError):
                token = path.read_bytes()
                lost = ApplicationError("the process that ran it ended", type=FailureType.WORKER)
                await client.get_async_activity_handle(task_token=token).fail(lost, rpc_timeout=PATIENCE)
                taken = True
            with suppress(OSError):
                path.unlink()
            return taken

    taken = sum(await asyncio.gather(*map(one, left_behind(folder))))
    if taken:
        log.warning("%d activities of an ended process are tried again", taken)
    return taken
