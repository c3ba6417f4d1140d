"""Has an engine serve a model: writes its specification, ends the server of another one, waits for the new one.

The launcher (workers/engine.py) becomes the server, the supervisor restarts it; this only says what is wanted and reads
what comes of it. Called by the `serve` activity.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from activities.generation.engine import EngineClient
from activities.generation.proof import Desired, write_whole
from activities.generation.server import MODULE, EngineSpec, pid_path, read_spec, spec_path
from workflows.errors import EngineError

LOOK_EVERY_S = 0.5
MAX_STARTS = 3
"""Servers of one spec that may end before they answer."""
NO_LAUNCHER_S = 45.0
"""How long there may be no launcher: the supervisor's longest pause before a restart, and a start."""
LAUNCHER = "workers.engine"
LOG_BYTES = 200_000
_FAULT = re.compile(r"\b\w+(Error|Exception)\b: ")
_ECHO = "Engine core initialization failed"
"""vLLM's server repeats its core's failure in these words."""


async def serve(client: EngineClient, spec: EngineSpec, home: Path, *, wait_s: float) -> bool:
    """Return once the engine answers as `spec`; True when that took a new server.

    Raises EngineError with the engine's own words when its server ends again and again or does not answer in time.
    """
    name = client.info.name
    before = read_spec(home, name)
    if before != spec:
        Desired.path(home, name).unlink(missing_ok=True)
        spec_path(home, name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(spec_path(home, name), spec.model_dump_json())
        if before is not None:
            end_server(home, name)
    elif await _answers(client, spec):
        await client.wake()
        return False
    started, seen = time.monotonic(), set[int]()
    while time.monotonic() - started < wait_s:
        served = await _names(client)
        if spec.fingerprint in served:
            return True
        if served:
            end_server(home, name)
        pid = _living(home, name)
        if pid is not None:
            seen.add(pid)
        elif not seen and time.monotonic() - started > NO_LAUNCHER_S:
            break
        if len(seen) > MAX_STARTS:
            raise EngineError(f"{name} ended {MAX_STARTS} times before it answered: {last_words(home, name)}")
        await asyncio.sleep(LOOK_EVERY_S)
    if not seen:
        raise EngineError(f"{name}: no launcher runs on this host; start it with `ratchet up`")
    raise EngineError(f"{name} does not answer after {wait_s:.0f} s: {last_words(home, name)}")


def end_server(home: Path, name: str) -> None:
    """End what the engine's pid file names, if it is an engine; the supervisor starts the next launcher."""
    pid = _living(home, name)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _living(home: Path, name: str) -> int | None:
    """The pid of the engine's launcher or server; None when it is dead or the number is somebody else's now."""
    path = pid_path(home, name)
    if not path.is_file() or not path.read_text().strip().isdigit():
        return None
    pid = int(path.read_text())
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return pid if MODULE in words or (LAUNCHER in words and name in words) else None


async def _names(client: EngineClient) -> list[str]:
    try:
        return await client.served_names()
    except EngineError:
        return []


async def _answers(client: EngineClient, spec: EngineSpec) -> bool:
    return spec.fingerprint in await _names(client) and await client.healthy()


def last_words(home: Path, name: str) -> str:
    """The errors at the end of the engine's log, or its last lines, and where the rest is."""
    path = home / "logs" / f"{name}.log"
    if not path.is_file():
        return f"it has no log {path}"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    faults = [line for line in lines if _FAULT.search(line) and _ECHO not in line]
    return f"{' | '.join(line[-300:] for line in (faults or lines)[-3:])} (log: {path})"
