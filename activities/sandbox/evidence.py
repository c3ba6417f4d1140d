"""Whose fault: what a result or a dead container says about the agent and its sandbox.

Pure rules over evidence that was measured. The agent's own doing ends its episode as a model failure; everything else
that happens to a sandbox is infrastructure. Called by the backend and the activities.
"""

from __future__ import annotations

import errno
from typing import Any

from activities.sandbox.channel import Result
from workflows.errors import SandboxError

HELD = 0.9
"""Share of its processes from which a sandbox counts as held by a fork bomb."""


class SandboxGone(SandboxError):
    """The container is no more. `by_agent`: through what ran in it; otherwise it was taken away."""

    default_retryable = False

    def __init__(self, message: str, *, by_agent: bool = False) -> None:
        super().__init__(message)
        self.by_agent = by_agent


def broken_by_agent(result: Result) -> str:
    """Why the sandbox can't be used after this command, through the agent's doing; empty while it can."""
    if result.oom_kills:
        return f"it ran out of memory: the kernel killed {result.oom_kills} of its processes"
    if result.spawn_errno:
        return f"no command can be started in it any more: {errno.errorcode.get(result.spawn_errno, '?')}"
    if result.pids_max > 0 and result.pids >= HELD * result.pids_max:
        return f"a fork bomb holds {result.pids} of its {result.pids_max} processes"
    if result.full:
        return f"its disk is full: {', '.join(result.full)}"
    return ""


def cause_of_death(state: dict[str, Any]) -> SandboxGone | None:
    """What the daemon's `State` of a container says; None while it runs."""
    if state.get("Running") and not state.get("Dead"):
        return None
    if state.get("OOMKilled"):
        return SandboxGone("it ran out of memory and its first process was killed", by_agent=True)
    return SandboxGone(f"the container ended ({state.get('Status')}, exit {state.get('ExitCode')})")
