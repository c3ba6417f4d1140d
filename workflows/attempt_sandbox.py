"""The attempt's sandbox as the Episode workflow uses it: acquire, act, verify, release, and what becomes of a loss.

Owns the lease, the journal and the times. Promises: a lost sandbox ends the attempt as the table says, unless the run
has `replay_on_loss`; then the attempt gets a fresh sandbox of the same image, its journal is replayed into it, and the
call that met the loss is made there, but only if every command ended as before. Replays cost the agent none of its time
and are bounded. Called by Episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from temporalio.exceptions import ActivityError

from workflows import policies
from workflows.attributes import shorten
from workflows.contracts import (
    AcquireInput,
    AcquireOutput,
    ActInput,
    ActOutput,
    EpisodeInput,
    JournalEntry,
    ReleaseInput,
    ReplayOutput,
    SandboxLease,
    StopReason,
    VerifyInput,
    VerifyOutput,
)
from workflows.ending import Ended, ended_by
from workflows.journal import Journal
from workflows.outcome import Boundary
from workflows.transcript import Transcript

Result = TypeVar("Result")

MOST_REPLAYS = 2
"""Sandboxes that one attempt may lose and go on."""


class AttemptSandbox:
    """`lease` is None until the first `acquire` has come back."""

    def __init__(self, input: EpisodeInput, transcript: Transcript) -> None:
        self._input = input
        self._transcript = transcript
        self._journal = Journal(input.limits.max_output_chars)
        self.lease: SandboxLease | None = None
        self.replays = 0
        self.command_s = 0.0
        """Time of the agent's own commands; those of a replay are not its own."""
        self.boot_s = 0.0
        self.verify_s = 0.0
        self._grading_s = 0.0
        """What the task's own verifier may take, beside what any may."""
        self.queue_s = 0.0
        self.evidence: dict[str, str] = {}
        """What was measured on whose doing the last call's end was; empty for most."""

    async def acquire(self) -> None:
        """Raises Ended."""
        message = AcquireInput(
            run=self._input.run,
            group_id=self._input.group_id,
            attempt_id=self._input.attempt_id,
            task=self._input.task,
            generation=self.replays,
        )
        summary = f"{'fresh ' if self.replays else ''}sandbox for {self._input.task.task_id}"
        try:
            out = await policies.call("acquire", message, AcquireOutput, policies.ACQUIRE, summary=summary)
        except ActivityError as error:
            raise self._noted(ended_by(error, Boundary.SANDBOX)) from error
        self.lease, self._grading_s = out.lease, out.grading_s
        self.boot_s += out.timing.run_s
        self.queue_s += out.timing.queue_s

    async def act(self, turn: int, command: str, timeout_s: float) -> ActOutput:
        """Run the agent's command. Raises Ended where the sandbox is lost."""

        def message(lease: SandboxLease) -> ActInput:
            return ActInput(
                lease=lease,
                op_id=f"t{turn}",
                turn=turn,
                command=command,
                step_timeout_s=timeout_s,
                max_output_chars=self._input.limits.max_output_chars,
            )

        policy, summary = policies.SANDBOX.lasting(timeout_s), f"turn {turn}: {shorten(command)}"
        out = await self._surviving(
            Boundary.SANDBOX,
            lambda lease: policies.call("act", message(lease), ActOutput, policy, summary=summary),
        )
        self.evidence = out.evidence
        self.command_s += out.command_s
        self.queue_s += out.timing.queue_s
        self._journal.add(message(self._held()), out)
        return out

    async def verify(self, answer: str, summary: str) -> VerifyOutput:
        """Raises Ended."""

        def message(lease: SandboxLease) -> VerifyInput:
            return VerifyInput(lease=lease, task=self._input.task, answer=answer)

        policy = policies.VERIFY.lasting(self._grading_s)
        out = await self._surviving(
            Boundary.VERIFIER,
            lambda lease: policies.call("verify", message(lease), VerifyOutput, policy, summary=summary),
        )
        self.evidence = out.evidence or self.evidence
        self.verify_s += out.timing.run_s
        self.queue_s += out.timing.queue_s
        return out

    async def release(self) -> None:
        """Runs on every way out. A release that fails is the sweep's work, not the attempt's fate."""
        message = ReleaseInput(attempt_id=self._input.attempt_id, lease=self.lease)
        with suppress(ActivityError):
            await policies.call("release", message, type(None), policies.CLEAN_UP, summary="remove the sandbox")

    # --- losses ---------------------------------------------------------------------------------------------------

    def _noted(self, end: Ended) -> Ended:
        self.evidence = end.evidence
        return end

    def _held(self) -> SandboxLease:
        assert self.lease is not None
        return self.lease

    async def _surviving(self, boundary: Boundary, call: Callable[[SandboxLease], Awaitable[Result]]) -> Result:
        """`call` on the sandbox, and after a loss on the one that takes its place. Raises Ended."""
        while True:
            try:
                return await call(self._held())
            except ActivityError as error:
                end = self._noted(ended_by(error, boundary))
                if end.reason is not StopReason.SANDBOX_LOST or not self._input.limits.replay_on_loss:
                    raise end from error
            await self._restore(end.why)

    async def _restore(self, why: str) -> None:
        """A fresh sandbox in the state that the lost one had. Raises Ended."""
        if self._journal.obstacle:
            raise Ended(StopReason.SANDBOX_LOST, f"{why}; {self._journal.obstacle}")
        if self.replays == MOST_REPLAYS:
            raise Ended(StopReason.SANDBOX_LOST, f"{why}; {MOST_REPLAYS} replays are spent")
        self.replays += 1
        image_id = self._held().image_id
        await self.acquire()
        if self._held().image_id != image_id:
            raise Ended(StopReason.SANDBOX_LOST, f"{why}; a fresh sandbox has another image: {self._held().image_id}")
        for part in self._journal.parts():
            # A loss within a replay begins it anew; what this sandbox has run by then is answered from its own journal.
            out = await self._surviving(Boundary.SANDBOX, self._replay(part))
            self.boot_s += out.timing.run_s
            self.queue_s += out.timing.queue_s
            if out.differs_at is not None:
                raise Ended(StopReason.SANDBOX_LOST, f"{why}; replayed, turn {out.differs_at} differed: {out.why}")
        self._transcript.replayed(self.replays, len(self._journal), why)

    def _replay(self, part: list[JournalEntry]) -> Callable[[SandboxLease], Awaitable[ReplayOutput]]:
        longest = min(sum(entry.step_timeout_s for entry in part), self._input.limits.time_budget_s)
        policy, summary = policies.SANDBOX.lasting(longest), f"replay {len(part)} commands, loss {self.replays}"
        return lambda lease: policies.call(
            "replay", self._journal.message(lease, part), ReplayOutput, policy, summary=summary
        )
