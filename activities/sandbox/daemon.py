"""The seam to the Docker daemon: every call bounded, queued and named.

Owns the client and the two semaphores; promises that whatever goes wrong between us and the daemon comes out as
SandboxError, retryable while the daemon may come back. Every call made through it is idempotent, so a dropped
connection is tried again at once. Called by the backend, the images and the exec channel.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import aiodocker
import aiohttp

from workflows.errors import SandboxError

Value = TypeVar("Value")

CREATES = 4
"""More at once only lengthen each other: the daemon starts some eight containers a second at best."""
OTHERS = 8
CALL_S = 30.0
NO_CONNECTION = 900
"""aiodocker's status for a daemon that it could not reach."""
PAUSES_S = (0.1, 0.5, 2.0)
"""Waits between tries on a connection that broke; a longer outage is Temporal's to retry."""


class Refused(SandboxError):
    """The daemon answered with an error. `status` is the HTTP status; final for 4xx."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, retryable=not 400 <= status < 500 or status in (404, 409, 429))
        self.status = status


@contextmanager
def tolerated(*statuses: int) -> Iterator[None]:
    """Go on after the block where the daemon refused with one of these statuses."""
    try:
        yield
    except Refused as refused:
        if refused.status not in statuses:
            raise


class Daemon:
    """`docker_host` as Docker spells it (`unix:///path`, `tcp://host:port`); empty is the local socket."""

    def __init__(self, docker_host: str) -> None:
        self.docker_host = docker_host or "unix:///var/run/docker.sock"
        self._client: aiodocker.Docker | None = None
        self._creates = asyncio.Semaphore(CREATES)
        self._others = asyncio.Semaphore(OTHERS)

    async def call(
        self,
        verb: str,
        action: Callable[[aiodocker.Docker], Awaitable[Value]],
        *,
        create: bool = False,
        queued: bool = True,
        limit_s: float = CALL_S,
    ) -> Value:
        """The value of `action(client)`. Raises Refused or SandboxError; `verb` says what was tried. The time in which
        the call waits for its turn counts in no limit; `queued` False takes no turn: for one that measures the daemon,
        or that lasts.
        """
        limit = (self._creates if create else self._others) if queued else nullcontext()
        async with limit:
            for pause in (*PAUSES_S, None):
                try:
                    async with asyncio.timeout(limit_s):
                        return await action(self._connected())
                except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
                    if isinstance(error, aiodocker.DockerError) and error.status != NO_CONNECTION:
                        raise Refused(f"docker {verb}: {error.message} ({error.status})", error.status) from error
                    if pause is None or isinstance(error, TimeoutError):
                        raise SandboxError(f"docker {verb}: no answer from {self.docker_host}: {error!r}") from error
                    await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _connected(self) -> aiodocker.Docker:
        # Made here and not in __init__: the client belongs to the loop that runs it.
        if self._client is None:
            self._client = aiodocker.Docker(url=self.docker_host)
        return self._client


async def containers_of(daemon: Daemon, labels: dict[str, str]) -> list[dict[str, Any]]:
    """All containers with these labels, running or not, newest first, as the daemon lists them."""
    wanted = [f"{name}={value}" for name, value in labels.items()]
    found = await daemon.call("list", lambda client: client.containers.list(all=True, filters={"label": wanted}))
    return [item._container for item in found]


async def killed_by_request(daemon: Daemon, container_id: str) -> bool:
    """Whether somebody asked the daemon to kill this container, as far back as its events go."""
    return await _noted(daemon, container_id, "kill", 0.0)


async def met_memory_limit(daemon: Daemon, container_id: str, since: float) -> bool:
    """Whether the kernel told the daemon, since that time, that this container was out of the memory it may have."""
    return await _noted(daemon, container_id, "oom", since)


async def _noted(daemon: Daemon, container_id: str, event: str, since: float) -> bool:
    filters = json.dumps({"container": [container_id], "event": [event]})
    asked = {"since": f"{since:.3f}", "until": f"{time.time():.3f}", "filters": filters}

    async def read(client: aiodocker.Docker) -> bytes:
        async with client._query("events", params=asked) as response:
            return bytes(await response.read())

    return bool((await daemon.call("events", read)).strip())


async def docker_root(daemon: Daemon) -> Path | None:
    """Docker's own folder, as the daemon names it; None while it does not answer."""
    with suppress(SandboxError):
        info = await daemon.call("info", lambda client: client.system.info())
        return Path(info["DockerRootDir"])
    return None


async def whole(work: Coroutine[Any, Any, Value]) -> Value:
    """Finish `work` before a cancellation goes on: what the daemon was asked for is then there to be removed."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
