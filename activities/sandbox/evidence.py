"""Whose fault: what a result, a dead container and the state of the host say together.

Pure rules over evidence that was measured. The agent's own doing ends its episode as a model failure, everything else
that happens to a sandbox is infrastructure, and what contradicts itself is nobody's. A counter of the sandbox itself
(its memory limit reached, its processes used up, its own file system full) speaks against the agent; a fault of the
host speaks for it. Called by the inquest, the backend and the verification.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from activities.sandbox.channel import Result
from workflows.errors import SandboxError

HELD = 0.9
"""Share of its processes from which a sandbox counts as held by a fork bomb."""


class Sign(StrEnum):
    """What was seen of a sandbox that an exit code does not explain."""

    DIED = "its first process ended"
    KILLED = "the shell of a command was killed"
    OUT_OF_MEMORY = "the kernel killed processes for want of memory"
    NOT_STARTED = "a command could not be started"
    FORK_BOMB = "its processes are used up"
    DISK_FULL = "its disk is full"
    TIMED_OUT = "a command did not end in its time"


class Blame(StrEnum):
    AGENT = "agent"
    HOST = "host"
    UNKNOWN = "unknown"


ON_A_FIT_HOST: dict[Sign, Blame] = {
    # The agent can neither signal process 1 nor reach its limits unseen.
    Sign.DIED: Blame.HOST,
    # Nobody else signals an agent's processes: a host out of memory leaves its mark in the sandbox's counter.
    Sign.KILLED: Blame.AGENT,
    # Its own limit was never reached: the memory that was missing was the host's.
    Sign.OUT_OF_MEMORY: Blame.HOST,
    Sign.NOT_STARTED: Blame.UNKNOWN,
    Sign.FORK_BOMB: Blame.UNKNOWN,
    Sign.DISK_FULL: Blame.UNKNOWN,
    Sign.TIMED_OUT: Blame.AGENT,
}
"""Who is blamed where neither a counter of the sandbox nor a fault of the host says anything."""


@dataclass(frozen=True)
class Finding:
    """One sign. `own`: a counter of the sandbox says that what ran in it is the cause, None where the counter that
    would say so can't tell; `words` say so to a person."""

    sign: Sign
    own: bool | None
    words: str


class SandboxGone(SandboxError):
    """The container is no more. `by_agent`: its own memory limit took it; otherwise it was taken away."""

    default_retryable = False

    def __init__(self, message: str, *, by_agent: bool = False, evidence: Mapping[str, str] | None = None) -> None:
        super().__init__(message, evidence=evidence)
        self.by_agent = by_agent


def silenced(words: str) -> SandboxGone:
    """The end of a machine whose own root, the agent, keeps it from answering."""
    return SandboxGone(f"it runs but does not answer any more: {words}", by_agent=True)


def blame(finding: Finding, faults: Sequence[str]) -> Blame:
    """Whose doing it was. `faults` are those of the host at that time; both at once contradict each other."""
    if finding.own is None:
        return Blame.UNKNOWN
    if finding.own:
        return Blame.UNKNOWN if faults else Blame.AGENT
    return Blame.HOST if faults else ON_A_FIT_HOST[finding.sign]


def find(result: Result) -> Finding | None:
    """What a command's result gives reason to look into; None for most."""
    held = result.pids_max > 0 and result.pids >= HELD * result.pids_max
    if result.oom_kills:
        words = f"it ran out of memory: the kernel killed {result.oom_kills} of its processes"
        return Finding(Sign.OUT_OF_MEMORY, True, words)
    if result.spawn_errno:
        name = errno.errorcode.get(result.spawn_errno, "?")
        words = f"no command can be started in it any more: {name}"
        return Finding(Sign.NOT_STARTED, held or result.pids_hits > 0, words)
    if held:
        words = f"a fork bomb holds {result.pids} of its {result.pids_max} processes"
        return Finding(Sign.FORK_BOMB, True, words)
    if result.full:
        return Finding(Sign.DISK_FULL, True, f"its disk is full: {', '.join(result.full)}")
    if result.timed_out:
        return Finding(Sign.TIMED_OUT, False, f"timed out after {result.seconds:.1f} s")
    if result.signal == signal.SIGKILL:
        return Finding(Sign.KILLED, False, "the command killed its own shell")
    return None


def broken_by_agent(result: Result) -> str:
    """Why the sandbox can't be used after this command, through the agent's doing on a fit host; empty while it can."""
    found = find(result)
    ended = found is not None and found.sign is not Sign.TIMED_OUT and blame(found, ()) is Blame.AGENT
    return found.words if found is not None and ended else ""


def cause_of_death(state: dict[str, Any]) -> SandboxGone | None:
    """What the daemon's `State` of a container says; None while it runs."""
    if state.get("Running") and not state.get("Dead"):
        return None
    if state.get("OOMKilled"):
        return SandboxGone("it ran out of memory and its first process was killed", by_agent=True)
    return SandboxGone(f"the container ended ({state.get('Status')}, exit {state.get('ExitCode')})")
