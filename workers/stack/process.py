"""Processes by identity: start one, know it again after a restart of the supervisor, signal it and nobody else.

A pid alone is reused by the system; a pid with its start time and the boot it belongs to is not. Every part leads its
own session, so what it leaves behind can be found and ended. Linux only (/proc). Called by the supervisor and by
`ratchet down` when no supervisor is left.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

PROC = Path("/proc")


class Process(BaseModel, frozen=True):
    """One process that this stack started. `started` is in clock ticks since the boot `boot`."""

    pid: int
    started: int
    boot: str
    fingerprint: str = ""
    """Digest of the command and environment it was started with; tells an adopter whether it is still the right one."""
    since: float = 0.0
    """Wall-clock time of its start, for people."""

    @property
    def alive(self) -> bool:
        """False for a zombie too, and for another process that got the same pid."""
        stat = _stat(self.pid)
        return stat is not None and stat.state not in "ZX" and stat.started == self.started and self.boot == boot_id()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process is still the same one."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def leftovers(self) -> list[Process]:
        """Live processes of the session it led, once it is dead: helpers that would hold its ports.

        The kernel gives a pid to nobody else while a session of that number has members, so a session is the dead
        leader's own exactly if no other process has its pid.
        """
        leader = _stat(self.pid)
        if self.boot != boot_id() or (leader is not None and leader.started != self.started):
            return []
        return [item for item in _session(self.pid) if item.started >= self.started and item.pid != self.pid]


class Stat(BaseModel, frozen=True):
    state: str
    session: int
    started: int


def identify(pid: int, *, fingerprint: str = "") -> Process | None:
    """The process that has this pid now; None if there is none or only a zombie."""
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return Process(pid=pid, started=stat.started, boot=boot_id(), fingerprint=fingerprint, since=time.time())


def spawn(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, fingerprint: str = ""
) -> tuple[Process, subprocess.Popen[bytes]]:
    """Start a process in its own session, both outputs appended to `log`. Raises OSError if it can't be started.

    Appending, so that the log can be cut while the process writes it.
    """
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # Not reaped yet, so the pid is still in /proc even if the process has already ended.
    return started_now(child.pid, fingerprint=fingerprint), child


def started_now(pid: int, *, fingerprint: str) -> Process:
    """A process that has just been started; one that is gone already is not `alive`."""
    stat = _stat(pid)
    started = stat.started if stat is not None else 0
    return Process(pid=pid, started=started, boot=boot_id(), fingerprint=fingerprint, since=time.time())


def kill_leftovers(process: Process) -> int:
    """End what a dead process left in its session; how many there were."""
    left = process.leftovers()
    for item in left:
        item.signal(signal.SIGKILL)
    return len(left)


def stop_now(process: Process, *, seconds: float) -> None:
    """SIGTERM, up to `seconds` to go, SIGKILL, then what it left behind. Blocks."""
    process.signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while process.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    process.signal(signal.SIGKILL)
    while process.alive:
        time.sleep(0.02)
    kill_leftovers(process)


def read_pid_file(path: Path) -> Process | None:
    """The process a pid file names, whether or not it lives; None for no file or one that can't be read."""
    if not path.is_file():
        return None
    with contextlib.suppress(ValueError):
        return Process.model_validate_json(path.read_text())
    return None


def write_atomically(path: Path, text: str) -> None:
    """Write a small file that readers see whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text)
    partial.replace(path)


@functools.cache
def boot_id() -> str:
    """Identity of this boot of the machine, which no process outlives."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold spaces and parentheses; the fields after the last one can't.
    fields = text.rpartition(")")[2].split()
    return Stat(state=fields[0], session=int(fields[3]), started=int(fields[19]))


def _session(session: int) -> Iterator[Process]:
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        stat = _stat(int(entry.name))
        if stat is not None and stat.session == session and stat.state not in "ZX":
            yield Process(pid=int(entry.name), started=stat.started, boot=boot_id())


def forget_dead(pid_file: Path) -> None:
    """Remove a file that names a process which is gone, or dead and not reaped."""
    with contextlib.suppress(OSError, ValueError):
        stat = _stat(int(pid_file.read_text()))
        if stat is None or stat.state in "ZX":
            pid_file.unlink()
