"""Messages between Episode, Janitor and the sandbox host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from workflows.contracts.base import Message, TaskRef, Timing
from workflows.contracts.words import Queue


class SandboxLease(Message):
    """One live sandbox and whose it is. `socket_dir` is a path on `host`."""

    sandbox_id: str
    container_id: str
    image_id: str
    host: str
    attempt_id: str
    queue: str = ""
    """Where calls on it go; empty: the episode's own queue."""
    runtime: str = ""
    """Container runtime that it was asked for with; empty: the daemon's own."""


class AcquireInput(Message):
    run: str
    group_id: str
    attempt_id: str
    task: TaskRef
    generation: int = 0
    """Sandboxes that the attempt lost before: each generation is another sandbox."""
    runtime: str = ""
    """Container runtime by name; empty: the daemon's own."""


class AcquireOutput(Message):
    lease: SandboxLease
    warm: bool = False
    """True when the sandbox had been started before anyone asked."""
    forked: bool = False
    """True when the task was not set up in it: it got what the setup had left in another sandbox."""
    grading_s: float = 0.0
    """How long the task's own verifier may take to a judgement; 0: no longer than that of any small task."""
    timing: Timing = Timing()


class ActInput(Message):
    lease: SandboxLease
    op_id: str
    """Key of the command inside the sandbox: a retry reads the result instead of running again."""
    turn: int
    command: str
    step_timeout_s: float
    max_output_chars: int


class ActOutput(Message):
    exit_code: int | None
    """None when the command was ended by a signal or by its time-out."""
    signal: int | None = None
    timed_out: bool = False
    output: str = ""
    """stdout and stderr as they came, invalid UTF-8 replaced, cut to `max_output_chars` with a mark."""
    total_bytes: int = 0
    sandbox_broken: str = ""
    """Why the sandbox can't be used any more through the agent's own doing; empty while it can."""
    command_s: float = 0.0
    """Time of the command itself, without queueing: what counts in the agent's time budget."""
    replayed: bool = False
    """True when a retry found the result of an earlier try."""
    output_digest: str = ""
    """SHA-256 of all that is compared when the command is replayed: how it ended, its size and the bytes kept."""
    evidence: dict[str, str] = {}
    """What was measured where the command's end had to be laid at the agent's door or ours; empty for the rest."""
    timing: Timing = Timing()

    def observation(self) -> str:
        """What the agent sees of its command: the output, then how it ended where that was not exit 0."""
        if self.timed_out:
            ending = f"(timed out after {self.command_s:.0f} s)"
        elif self.signal is not None:
            ending = f"(ended by signal {self.signal})"
        elif self.exit_code != 0:
            ending = f"(exit {self.exit_code})"
        else:
            ending = ""
        body = self.output.rstrip("\n")
        return "\n".join(part for part in (body, ending) if part) or "(no output)"


class JournalEntry(Message):
    """One command that an attempt has run, and how it ended."""

    turn: int
    op_id: str
    command: str
    step_timeout_s: float
    ending: str
    """For people. Example: `exit 0, 14 bytes`."""
    output_digest: str


class ReplayInput(Message):
    """Run these commands, in order, in the sandbox that takes a lost one's place."""

    lease: SandboxLease
    entries: list[JournalEntry]
    max_output_chars: int


class ReplayOutput(Message):
    differs_at: int | None
    """Turn of the first command that ended otherwise, after which none was run; None when all agree."""
    why: str = ""
    timing: Timing = Timing()


class VerifyInput(Message):
    lease: SandboxLease
    task: TaskRef
    answer: str
    """The agent's final answer, empty if it gave none."""


class VerifyOutput(Message):
    reward: float
    passed: bool
    detail: str = ""
    tampered: bool = False
    evidence: dict[str, str] = {}
    """What was compared where the verifier was tampered with."""
    timing: Timing = Timing()


class ReleaseInput(Message):
    attempt_id: str
    lease: SandboxLease | None = None
    """None when the attempt never learnt what it had acquired: the release then goes by label."""


class SweepInput(Message):
    """Remove what a closed run left behind: containers by label, spool files, unfinished uploads."""

    run: str


class SweepOutput(Message):
    containers: int = 0
    files: int = 0
    uploads: int = 0


class HostInput(Message):
    """A word to a sandbox host."""

    host: str
    drain: bool | None = None
    """Whether it takes no new sandbox from now on; None changes nothing."""


class HostStatus(Message):
    """A sandbox host's own account of itself."""

    host: str
    slots: int
    """Sandboxes that may live at once."""
    used: int
    waiting: int = 0
    """Beside them, sandboxes of the warm pool."""
    draining: bool = False
    trouble: str = ""
    """Why it takes none for now, though it has room; empty while it does."""

    @property
    def words(self) -> str:
        """Example: `draining, 3 of 16 sandboxes in use`."""
        first = "draining, " if self.draining else f"takes none ({self.trouble}), " if self.trouble else ""
        return f"{first}{self.used} of {self.slots} sandboxes in use"


class JanitorInput(Message):
    """One pass of the janitor: what no live attempt and no live run owns is removed once it is old enough."""

    sandbox_queues: list[str] = [Queue.EPISODES]
    """One queue per host with sandboxes; the worker that polls it sweeps its host."""
    sandbox_grace_s: float = Field(300, ge=0)
    """Age from which a sandbox may go whose Episode workflow runs no more."""
    unowned_grace_s: float = Field(3600, ge=0)
    """The same for a sandbox that is no attempt's, and for temporary files."""
    object_grace_s: float = Field(3600, ge=0)
    """The same for objects and unfinished uploads, counted from their last write and from the end of their run."""


MOST_ERRORS = 20


class Swept(Message):
    """What a pass removed, or a part of it. Example: `removed={"containers/terminated": 2, "objects": 5}`."""

    removed: dict[str, int] = {}
    """Counts by kind, for sandboxes with the ending of their Episode workflow: a closed status, `unknown` to the
    server, or `unowned`."""
    bytes: int = 0
    errors: list[str] = []
    """What could not be swept, and why, the first twenty; the next pass tries again."""

    @classmethod
    def together(cls, parts: Sequence[Swept]) -> Swept:
        removed = sum((Counter(part.removed) for part in parts), Counter[str]())
        return cls(
            removed={name: removed[name] for name in sorted(removed) if removed[name]},
            bytes=sum(part.bytes for part in parts),
            errors=[error for part in parts for error in part.errors][:MOST_ERRORS],
        )
