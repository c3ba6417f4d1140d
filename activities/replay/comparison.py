"""Whether a command that was run again ended as it did the first time.

Pure. Owns the rules: how a command ended and the digest of its output must be equal, except that of a command which
its time-out ended only the time-out is compared (how far it got depends on the machine's speed, and is noted), and that
an end which was not recorded can't be compared. Called by `Player`.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Match(StrEnum):
    AGREES = "agrees"
    DIFFERS = "differs"
    UNRECORDED = "unrecorded"
    """The sandbox or the worker was gone before the first run's end was written down."""


class Ending(BaseModel):
    """How one run of a command ended. `exit_code` None: its time-out, a signal, or nobody knows."""

    model_config = ConfigDict(frozen=True)

    exit_code: int | None = None
    timed_out: bool = False
    digest: str = ""
    broken: str = ""
    """Why the sandbox can't be used after it; empty while it can, and where that was not recorded."""

    @property
    def known(self) -> bool:
        return self.exit_code is not None or self.timed_out or self.digest != ""

    def __str__(self) -> str:
        if self.broken:
            return f"broke the sandbox: {self.broken}"
        if self.timed_out:
            return "timed out"
        if self.exit_code is not None:
            return f"exit {self.exit_code}"
        return "ended by a signal" if self.digest else "not recorded"


def compare(recorded: Ending, replayed: Ending) -> tuple[Match, str]:
    """(match, note). The note says what a person should know beyond the match; mostly empty."""
    if not recorded.known:
        return Match.UNRECORDED, "how it ended was not recorded"
    if recorded.timed_out and replayed.timed_out:
        partial = recorded.digest and recorded.digest != replayed.digest
        return Match.AGREES, "what it had printed by its time-out differs" if partial else ""
    if (recorded.exit_code, recorded.timed_out) != (replayed.exit_code, replayed.timed_out):
        return Match.DIFFERS, "it ended otherwise"
    if not recorded.digest:
        return Match.AGREES, "its output was not recorded, only its exit code is compared"
    return (Match.AGREES, "") if recorded.digest == replayed.digest else (Match.DIFFERS, "its output differs")
