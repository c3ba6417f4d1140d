"""Health checks of the parts: each asks the part itself, answers in about two seconds, and says what is wrong in words.

A check returns a `Health`; it raises nothing for a part that doesn't answer. Called by the supervisor.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx

ASK_S = 2.0
HEARTBEAT_S = 30.0
"""A worker touches its heartbeat file every 2 s; one that has not for this long is called silent."""

DOCKER_SOCKET = "unix:///var/run/docker.sock"


class Health(NamedTuple):
    ok: bool
    detail: str = ""


Check = Callable[[], Awaitable[Health]]


async def alive() -> Health:
    """For parts whose life is all there is to see."""
    return Health(True)


def http(url: str, *, accept: Callable[[int], bool] = lambda status: status < 300) -> Check:
    """Healthy when a GET of `url` answers with an accepted status."""

    client = _client()

    async def check() -> Health:
        return await _ask(client, url, accept)

    return check


def docker(address: str) -> Check:
    """Healthy when a Docker daemon answers a ping at `unix://path` or `tcp://host:port`."""

    unix = address.startswith("unix://")
    base = "http://docker" if unix else address.replace("tcp://", "http://", 1)
    client = _client(uds=address.removeprefix("unix://") if unix else None)

    async def check() -> Health:
        return await _ask(client, f"{base}/_ping", lambda status: status == 200)

    return check


def heartbeat(file: Path) -> Check:
    """Healthy while `file` was touched in the last 30 s; what lies beside it as `.txt` is said of it."""

    async def check() -> Health:
        try:
            age = time.time() - file.stat().st_mtime
        except FileNotFoundError:
            return Health(False, "no heartbeat yet")
        if age >= HEARTBEAT_S:
            return Health(False, f"last heartbeat {age:.0f} s ago")
        with suppress(OSError):
            return Health(True, file.with_suffix(".txt").read_text()[:200])
        return Health(True)

    return check


def engine(url: str, spec: Path) -> Check:
    """Healthy while the launcher waits for a model or loads one (nothing listens yet), and when /health says so.

    How long a load may take is for the activity that asked for it to decide; it knows the model.
    """
    ask = http(f"{url}/health")

    async def check() -> Health:
        health = await ask()
        if health.detail != "connection refused":
            return health
        return Health(True, "loading a model" if spec.exists() else "waiting for a model")

    return check


def _client(uds: str | None = None) -> httpx.AsyncClient:
    """A client that opens a connection per question: a kept one would outlive the part it was opened to."""
    transport = httpx.AsyncHTTPTransport(uds=uds, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
    return httpx.AsyncClient(timeout=ASK_S, transport=transport)


async def _ask(client: httpx.AsyncClient, url: str, accept: Callable[[int], bool]) -> Health:
    try:
        response = await client.get(url)
    except httpx.ConnectError:
        return Health(False, "connection refused")
    except httpx.TimeoutException:
        return Health(False, f"no answer in {ASK_S:.0f} s")
    except httpx.HTTPError as error:
        return Health(False, f"{type(error).__name__}: {error}")
    return Health(True) if accept(response.status_code) else Health(False, f"HTTP {response.status_code}")
