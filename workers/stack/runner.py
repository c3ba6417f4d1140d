"""Keeps one part running: adopts or starts its process, asks for its health, restarts it, ends it.

Promises: a process that ends is started again whatever its exit code, after a pause that doubles from 0.5 s to 30 s
and is forgotten once the part has been healthy for 15 s; one that lives but fails its check for long is ended and
started again; a process that an earlier supervisor started is taken over if it is what would be started now, and
ended first if not. Nothing is signalled that this stack did not start. Called by the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from workers.stack.forking import ForkServer
from workers.stack.health import Health
from workers.stack.parts import Part
from workers.stack.process import (
    Process,
    forget_dead,
    kill_leftovers,
    read_pid_file,
    spawn,
    stop_now,
    write_atomically,
)
from workers.stack.state import Home
from workers.stack.status import PartState, PartStatus

log = logging.getLogger("supervisor")

POLL_S = 0.25
CHECK_S = 2.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
FORGIVE_S = 15.0
ABSENT_S = 10.0
"""How long somebody else's process may be silent before one is started here: time for its own supervisor to act."""


def pause_after(failures: int) -> float:
    """Seconds before the next start after `failures` ends in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1))


class Runner:
    """One part's life. `run` goes on until it is cancelled; then `stop` ends the process."""

    def __init__(self, part: Part, *, home: Home, env: Mapping[str, str], changed: Callable[[], None]) -> None:
        self.part = part
        self.ready = asyncio.Event()
        """Set once the part has been healthy or done for the first time."""
        self.status = PartStatus(name=part.name, address=part.address, log=str(home.log(part.name)))
        self._cwd = home.path
        self._log = home.log(part.name)
        self._pid_file = home.pid_file(part.name)
        self._env = {**env, **part.env}
        self._fingerprint = part.fingerprint(env)
        self._changed = changed
        self._process: Process | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._starting: asyncio.Future[Process] | None = None
        self._fork_server: ForkServer | None = None
        if part.forked:
            self._fork_server = ForkServer(
                part.argv[2:],
                env=self._env,
                cwd=self._cwd,
                log=self._log,
                fingerprint=self._fingerprint,
                patience_s=part.start_s,
            )
        self._failures = 0

    async def run(self) -> None:
        await self._adopt()
        while True:
            if self._process is None:
                if self.part.elsewhere and await self._answers_elsewhere():
                    continue
                if self.part.missing:
                    self._set(PartState.MISSING, self.part.missing)
                    await asyncio.sleep(CHECK_S)
                    continue
                await self._start()
            reason = await self._watch() if self._process is not None else self.status.detail
            if self.part.once and reason.partition(",")[0] == "exit 0":
                self._forget()
                self._set(PartState.DONE, "")
                self.ready.set()
                return
            await self._pause(reason)

    async def stop(self) -> None:
        """SIGTERM, time to drain, SIGKILL; the part's whole session is gone when this returns."""
        if self._starting is not None:
            await self._stop_starting()
        if self._process is not None:
            self._set(self.status.state, "stopping")
            await asyncio.to_thread(stop_now, self._process, seconds=self.part.stop_s)
            self._forget()
        if self._fork_server is not None:
            await asyncio.to_thread(self._fork_server.close)
        if self.status.state not in (PartState.ELSEWHERE, PartState.DONE):
            self._set(PartState.STOPPED, "")

    async def _adopt(self) -> None:
        found = read_pid_file(self._pid_file)
        if found is None:
            return
        if found.alive and found.fingerprint == self._fingerprint and not self.part.once:
            log.info("%s: took over pid %d", self.part.name, found.pid)
            self._process = found
            self._set(PartState.STARTING, "taken over")
            return
        if found.alive:
            log.info("%s: ends pid %d, which was started with other settings", self.part.name, found.pid)
        await asyncio.to_thread(stop_now, found, seconds=self.part.stop_s)
        self._pid_file.unlink(missing_ok=True)

    async def _start(self) -> None:
        if self.part.heartbeat is not None:
            self.part.heartbeat.unlink(missing_ok=True)
        if self.part.pid_file is not None:
            forget_dead(self.part.pid_file)
        try:
            if self._fork_server is not None:
                await self._fork(self._fork_server)
            else:
                self._process, self._child = spawn(
                    self.part.argv, env=self._env, cwd=self._cwd, log=self._log, fingerprint=self._fingerprint
                )
        except OSError as error:
            self._set(PartState.STARTING, f"could not be started: {error}")
            return
        assert self._process is not None
        log.info("%s: started, pid %d", self.part.name, self._process.pid)
        try:
            write_atomically(self._pid_file, self._process.model_dump_json())
        except OSError as error:
            # A full disk must not end the supervisor; only the next one can't know this process.
            log.warning("%s: its pid file can't be written: %s", self.part.name, error)
        self._set(PartState.STARTING, "")

    async def _fork(self, server: ForkServer) -> None:
        self._set(PartState.STARTING, "imports")
        self._starting = asyncio.ensure_future(asyncio.to_thread(server.start))
        try:
            self._process = await asyncio.shield(self._starting)
        except OSError:
            self._starting = None
            raise
        self._starting = None

    async def _stop_starting(self) -> None:
        """The supervisor stops, and a process of the part may just be coming."""
        assert self._fork_server is not None and self._starting is not None
        await asyncio.to_thread(self._fork_server.close)
        with contextlib.suppress(OSError):
            self._process = await self._starting
        self._starting = None

    async def _watch(self) -> str:
        """Until the process has ended or was ended here; why."""
        assert self._process is not None
        clock = time.monotonic
        began = clock()
        good_since: float | None = None
        failing_since: float | None = None
        next_check = began
        while self._process.alive:
            if clock() < next_check:
                await asyncio.sleep(POLL_S)
                continue
            health = Health(True) if self.part.once else await self.part.check()
            next_check = clock() + (POLL_S if good_since is None else CHECK_S)
            if not self._process.alive:
                break
            if health.ok and not self.part.once:
                good_since = good_since or clock()
                failing_since = None
                if clock() - good_since > FORGIVE_S:
                    self._failures = 0
                self._set(PartState.HEALTHY, health.detail)
                self.ready.set()
            elif not health.ok:
                failing_since = failing_since or clock()
                limit = self.part.start_s if good_since is None else self.part.hang_s
                state = PartState.STARTING if good_since is None else PartState.UNHEALTHY
                self._set(state, health.detail)
                if clock() - failing_since > limit:
                    await asyncio.to_thread(stop_now, self._process, seconds=self.part.stop_s)
                    self._exit_code()
                    return f"hung ({health.detail} for {limit:.0f} s)"
        code = self._exit_code()
        left = kill_leftovers(self._process)
        ending = "ended" if code is None else f"exit {code}" if code >= 0 else signal.Signals(-code).name
        return ending + (f", {left} of its processes were ended" if left else "")

    async def _pause(self, reason: str) -> None:
        self._forget()
        self._failures += 1
        seconds = pause_after(self._failures)
        log.warning("%s: %s; starts again in %.1f s", self.part.name, reason, seconds)
        self.status = self.status.model_copy(update={"restarts": self.status.restarts + 1})
        self._set(PartState.RESTARTING, reason)
        await asyncio.sleep(seconds)

    async def _answers_elsewhere(self) -> bool:
        """Watch somebody else's process while it answers; False once none does (any more)."""
        failing_since: float | None = None
        seen = False
        while True:
            health = await self.part.check()
            if health.ok:
                seen, failing_since = True, None
                self._set(PartState.ELSEWHERE, "not started here")
                self.ready.set()
            else:
                failing_since = failing_since or time.monotonic()
                if not seen or time.monotonic() - failing_since > ABSENT_S:
                    return False
                self._set(PartState.UNHEALTHY, health.detail)
            await asyncio.sleep(CHECK_S)

    def _exit_code(self) -> int | None:
        """Exit code of our own child, reaped here; None for an adopted process, which is another's child."""
        code = self._child.wait() if self._child is not None else None
        if self._fork_server is not None:
            code = self._fork_server.exit_code()
        self._child = None
        return code

    def _forget(self) -> None:
        self._process = None
        if self._child is not None:
            self._child.wait()
            self._child = None
        self._pid_file.unlink(missing_ok=True)

    def _set(self, state: PartState, detail: str) -> None:
        process = self._process
        update = {
            "state": state,
            "detail": detail,
            "pid": process.pid if process else None,
            "since": process.since if process else None,
        }
        new = self.status.model_copy(update=update)
        if new != self.status:
            self.status = new
            self._changed()


def retire(pid_file: Path, *, seconds: float = 15.0) -> None:
    """End what a pid file names and remove the file: a part that nobody wants any more. Blocks."""
    process = read_pid_file(pid_file)
    if process is not None:
        stop_now(process, seconds=seconds)
    pid_file.unlink(missing_ok=True)
