"""The state of this host, read when an ending has to be laid at somebody's door.

Owns what is read and where the limits lie; promises that a figure this host does not offer is left out and never
guessed. Reads files of /proc and /sys only: cheap, blocking, no daemon. Called by the inquest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

CANARY_S = 20.0
"""Within this the host starts a fresh sandbox and runs a trivial command in it: some sixty times what it takes."""
DISK_FLOOR_MB = 64
STALL_PERCENT = 20.0
"""Share of the last ten seconds in which nothing ran because all waited for memory."""
AVAILABLE_FLOOR = 0.1
"""Share of the memory below which such a stall is the host's and not that of one sandbox at its limit."""

AT_LIMIT = 0.99
"""The kernel charges memory in batches: a sandbox whose limit killed a process may end a few pages below it."""


class Limit(StrEnum):
    """What a cgroup's counters say of its own memory limit, over its whole life."""

    NEVER = "never reached"
    TOUCHED = "reached"
    """Its peak was there, perhaps with nothing but files that the kernel could drop: no proof of a kill."""
    EXCEEDED = "exceeded"
    """An allocation failed at it."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Health:
    """What was read; None for what this host does not offer. Shares are 0 to 1, pressures percent of ten seconds."""

    disk_free_mb: int | None = None
    """Free on the file system of Docker's root."""
    memory_available: float | None = None
    memory_stall: float | None = None
    cpu_pressure: float | None = None
    io_pressure: float | None = None

    @property
    def faults(self) -> list[str]:
        """What is wrong with the host, in words; empty for a fit one."""
        found = []
        if self.disk_free_mb is not None and self.disk_free_mb < DISK_FLOOR_MB:
            found.append(f"the host's disk is full ({self.disk_free_mb} MB free)")
        if self.memory_stall is not None and self.memory_available is not None:
            stalls = self.memory_stall >= STALL_PERCENT and self.memory_available < AVAILABLE_FLOOR
            found += [f"the host stalls for memory ({self.memory_stall:.0f} % of the time)"] * stalls
        return found

    def report(self) -> dict[str, str]:
        """The figures that there are, as the episode's evidence keeps them."""
        figures = {
            "disk free": self.disk_free_mb and f"{self.disk_free_mb} MB",
            "memory available": self.memory_available and f"{self.memory_available:.0%}",
            "memory stall": self.memory_stall is not None and f"{self.memory_stall:.1f} %",
            "cpu pressure": self.cpu_pressure is not None and f"{self.cpu_pressure:.1f} %",
            "io pressure": self.io_pressure is not None and f"{self.io_pressure:.1f} %",
        }
        return {name: value for name, value in figures.items() if value}


class Host:
    """`proc` and `cgroups` are for tests."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroups = cgroups

    def health(self, docker_root: Path | None) -> Health:
        """`docker_root` None: the daemon did not say, or it is another machine's."""
        memory = dict(_pairs(self._proc / "meminfo"))
        total, available = memory.get("MemTotal:", 0), memory.get("MemAvailable:")
        return Health(
            disk_free_mb=_free_mb(docker_root),
            memory_available=available / total if total and available is not None else None,
            memory_stall=self._pressure("memory", "full"),
            cpu_pressure=self._pressure("cpu", "some"),
            io_pressure=self._pressure("io", "full"),
        )

    def oom_kills(self) -> int | None:
        """Processes that the kernel killed for want of memory since it booted, whatever limit was reached."""
        return dict(_pairs(self._proc / "vmstat")).get("oom_kill")

    def memory_limit(self, pid: int) -> Limit:
        """How the cgroup of a process stands to its own memory limit."""
        for line in _lines(self._proc / str(pid) / "cgroup"):
            _, controllers, path = line.split(":", 2)
            folder = path.lstrip("/")
            if controllers == "memory":
                # Not `failcnt`, which new kernels leave at zero.
                most = _number(self._cgroups / "memory" / folder / "memory.max_usage_in_bytes")
                limit = _number(self._cgroups / "memory" / folder / "memory.limit_in_bytes")
                if most is not None and limit is not None:
                    return Limit.TOUCHED if most >= AT_LIMIT * limit else Limit.NEVER
            elif not controllers:
                events = dict(_pairs(self._cgroups / folder / "memory.events"))
                if "oom" in events:
                    return Limit.EXCEEDED if events["oom"] > 0 else Limit.NEVER
        return Limit.UNKNOWN

    def _pressure(self, what: str, kind: str) -> float | None:
        """avg10 of a line such as `some avg10=1.53 avg60=0.87 avg300=0.73 total=4242`."""
        for line in _lines(self._proc / "pressure" / what):
            word, first, *_ = line.split()
            if word == kind:
                return float(first.removeprefix("avg10="))
        return None


def _free_mb(folder: Path | None) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(folder).free >> 20 if folder is not None else None
    return None


def _lines(path: Path) -> list[str]:
    """Empty where the file is not there or may not be read."""
    with suppress(OSError):
        return path.read_text().splitlines()
    return []


def _number(path: Path) -> int | None:
    return next(map(int, _lines(path)), None)


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    """(name, number) of files whose lines begin with the two."""
    for line in _lines(path):
        name, value, *_ = line.split()
        yield name, int(value)
