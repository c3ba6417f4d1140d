"""Messages between Episode and the worker that runs an external agent program."""

from __future__ import annotations

from workflows.contracts.base import Message, TaskRef, Timing
from workflows.contracts.episodes import RolloutLimits, TurnRecord
from workflows.contracts.sandbox import SandboxLease
from workflows.contracts.words import StopReason


class RunAgentInput(Message):
    """Run `limits.agent` from its start to its end, with the policy behind its endpoint and this sandbox."""

    run: str
    attempt_id: str
    model: str
    """Folder of the run's model: its tokenizer and chat template."""
    task: TaskRef
    limits: RolloutLimits
    lease: SandboxLease
    seed: int
    """Of the sibling; each call derives its own."""
    priority: int = 0
    pinned_version: int | None = None
    started_at: float = 0.0
    """When the attempt began, seconds since the epoch."""


class RunAgentOutput(Message):
    """A program that ended through its own doing or the policy's; what infrastructure did is an error."""

    stop_reason: StopReason
    why: str
    answer: str = ""
    """What it left in its answer file; else what the policy's last text says after `Answer:`."""
    turns: list[TurnRecord]
    """The calls that were answered, in the order in which they came."""
    sampled_tokens: int = 0
    sequence_tokens: int = 0
    """Of the longest branch."""
    command_s: float = 0.0
    """Time of its commands in the sandbox."""
    evidence: dict[str, str] = {}
    timing: Timing = Timing()
