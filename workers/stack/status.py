"""What the supervisor tells the command line: one record per part, in a file that is always whole."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class PartState(StrEnum):
    QUEUED = "queued"
    """Waits for the parts that must be up before it."""
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """Lives, but fails its check; restarted if that lasts."""
    RESTARTING = "restarting"
    """Has ended; the next try waits for its turn."""
    ELSEWHERE = "elsewhere"
    """Somebody else's process does the work; it is neither started nor stopped here."""
    DONE = "done"
    """Ran to its end, as it should."""
    MISSING = "missing"
    """Can't be started on this machine."""
    STOPPED = "stopped"
    UNSUPERVISED = "unsupervised"
    """Lives, and nobody watches it."""

    @property
    def good(self) -> bool:
        return self in (PartState.HEALTHY, PartState.ELSEWHERE, PartState.DONE)


class PartStatus(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    state: PartState = PartState.QUEUED
    detail: str = ""
    pid: int | None = None
    since: float | None = None
    """Wall-clock time at which its process started."""
    restarts: int = 0
    address: str = ""
    log: str = ""


class StackStatus(BaseModel):
    """All parts in their order of start."""

    model_config = ConfigDict(frozen=True)

    supervisor_pid: int
    written: float
    parts: list[PartStatus]

    @property
    def good(self) -> bool:
        return all(part.state.good for part in self.parts)
